"""1-bit Adam (https://arxiv.org/abs/2102.02888), as DeepSpeed's OneBitAdam: stages 0 and 1.

For `freeze_step` updates it is Adam without bias correction. Then the second moment stays fixed, and the
ranks exchange the signs of their momenta instead of gradients. Each rank adds its own gradient to the common
momentum, compresses the sum to one bit per element with error feedback, and sends each rank its part. That
rank averages the parts, compresses the average with an error of its own, and sends it to all. The result is
the next momentum, the same on every rank.

[Note: elements without a scale] A sign cannot represent zero. Elements whose gradient was zero in the whole
warm-up (rows of tokens not seen, dead units) get momenta of their block's size, and their second moment, by
which these are divided, is zero for ever. These elements do not change except by the weight decay;
DeepSpeed's `exp_avg_mask` serves the same purpose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from zerotrain.contract.config import OptimizerConfig
from zerotrain.runtime.offload.resident import ResidentStates
from zerotrain.runtime.offload.states import UnitStates
from zerotrain.runtime.optim.groups import Hyper
from zerotrain.runtime.optim.joint import JointUnit, ParameterRun
from zerotrain.runtime.optim.onebit_codec import PackedSigns, SignCodec
from zerotrain.runtime.optim.update import tiles
from zerotrain.runtime.zero.buffer import flat_zeros
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.state import EXP_AVG, EXP_AVG_SQ, SERVER_ERROR, WORKER_ERROR, StreamKey


@dataclass(kw_only=True)
class _Buffers:
    """The buffers of one unit beside its sharded states."""

    momentum: torch.Tensor
    """The whole momentum, on every rank."""
    worker_error: torch.Tensor
    """The error that this rank's compression has left so far, of the whole unit."""
    server_error: torch.Tensor
    """The error of the compressed average, of this rank's interval."""
    whole: SignCodec
    own: SignCodec
    is_current: bool = False
    """Whether `momentum` is whole; before the first compressed step only this rank's interval is valid."""


class OneBitAdamRule:
    """A `JointRule` that communicates with the other ranks itself from `freeze_step` on."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.freeze_step = int(config.params.get("freeze_step", 100_000))
        self._eps_inside = bool(config.params.get("eps_inside_sqrt", False))
        self._buffers: dict[str, _Buffers] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the state streams: the second moment; the first is part of a buffer made by `attach`."""
        return (EXP_AVG_SQ,)

    def is_local(self, num_updates: int) -> bool:
        """Return whether the next update takes this rank's own gradients instead of the average."""
        return num_updates >= self.freeze_step

    def attach(self, states: ResidentStates, ledger: MemoryLedger) -> None:
        """Make the buffers of a unit; the momentum's part of this rank becomes a state stream."""
        unit, device = states.unit, states.master.device
        numel, own = unit.layout.padded_numel, unit.stop - unit.start

        def made(size: int) -> torch.Tensor:
            return ledger.count(MemoryKind.STATES, flat_zeros(size, dtype=torch.float32, device=device))

        momentum = made(numel)
        low, high = states.interval
        states.adopt(EXP_AVG, momentum[low:high])
        if unit.comm.world_size > 1:
            self._buffers[unit.name] = _Buffers(
                momentum=momentum,
                worker_error=made(numel),
                server_error=made(own),
                whole=SignCodec(unit.layout, 0, numel, device),
                own=SignCodec(unit.layout, unit.start, unit.stop, device),
            )

    def update_units(self, units: Sequence[JointUnit], step: int, *, grad_scale: float) -> None:
        """Update the units as `JointRule`."""
        is_local = self.is_local(step - 1)
        for unit in units:
            buffers = self._buffers.get(unit.states.unit.name)
            if is_local and buffers is not None:
                self._exchange(unit, buffers, grad_scale)
            else:
                for segment in unit.segments:
                    self._add_gradient(unit, segment, grad_scale, is_frozen=is_local)
            for segment in unit.segments:
                self._apply(unit, segment)

    def _add_gradient(self, unit: JointUnit, segment: ParameterRun, scale: float, *, is_frozen: bool) -> None:
        beta1, beta2 = segment.hyper.betas
        for tile in tiles(segment.start, segment.stop, unit.grads.device):
            grad = unit.grads[tile].mul_(scale) if scale != 1.0 else unit.grads[tile]
            unit.states.by_kind[EXP_AVG][tile].mul_(beta1).add_(grad, alpha=1 - beta1)
            if not is_frozen:
                unit.states.by_kind[EXP_AVG_SQ][tile].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

    def _exchange(self, update: JointUnit, buffers: _Buffers, scale: float) -> None:
        """Exchange the compressed mean of the ranks' momenta, into the common momentum."""
        unit, momentum = update.states.unit, buffers.momentum
        comm = unit.comm
        if not buffers.is_current:
            comm.all_gather(momentum, momentum[unit.start : unit.stop], label=unit.name).wait()
            buffers.is_current = True
        hypers = {segment.fqn: segment.hyper for segment in update.segments}
        for part in unit.layout.segments:
            _mix(momentum, update.accumulator, part.start, part.stop, hyper=hypers[part.fqn], scale=scale)
        # The momentum is overwritten from here on: it becomes what is sent, then what its compression lost.
        signs = buffers.whole.pack(momentum.add_(buffers.worker_error))
        buffers.worker_error.copy_(momentum)
        ranks = comm.world_size
        sent = signs.framed(ranks)
        received = torch.empty_like(sent)
        comm.exchange(received, sent, label=unit.name).wait()
        signs = PackedSigns.unframed(received, ranks)
        average = buffers.server_error
        for rank in range(ranks):
            signs.part(rank, ranks).add_to(average, weight=1.0 / ranks)
        buffers.own.clear_gaps(average)
        mine = buffers.own.pack(average).framed(1)
        comm.all_gather(received, mine, label=unit.name).wait()
        PackedSigns.unframed(received, ranks).add_to(momentum.zero_(), weight=1.0)
        buffers.whole.clear_gaps(momentum)

    def _apply(self, unit: JointUnit, segment: ParameterRun) -> None:
        hyper, states = segment.hyper, unit.states
        for tile in tiles(segment.start, segment.stop, states.master.device):
            weight, variance = states.master[tile], states.by_kind[EXP_AVG_SQ][tile]
            inside = self._eps_inside
            divisor = variance.add(hyper.eps).sqrt_() if inside else variance.sqrt().add_(hyper.eps)
            update = states.by_kind[EXP_AVG][tile] / divisor
            update.masked_fill_(variance == 0, 0.0)  # see [Note: elements without a scale]
            if hyper.weight_decay:
                update.add_(weight, alpha=hyper.weight_decay)
            weight.add_(update, alpha=-hyper.lr)

    # --- checkpoints: the errors differ between ranks, so each rank stores its interval of every rank's
    # errors

    @torch.no_grad()
    def error_streams(self, states: Mapping[str, UnitStates]) -> dict[StreamKey, torch.Tensor]:
        """Return this rank's interval of the server error and of every rank's worker error. Collective."""
        streams: dict[StreamKey, torch.Tensor] = {}
        for name, buffers in self._buffers.items():
            comm = states[name].unit.comm
            copies = torch.empty_like(buffers.worker_error)
            comm.exchange(copies, buffers.worker_error, label=name).wait()
            streams[name, SERVER_ERROR] = buffers.server_error
            for rank, part in enumerate(copies.view(comm.world_size, -1)):
                streams[name, f"{WORKER_ERROR}.{rank}"] = part
        return streams

    @torch.no_grad()
    def take_errors(
        self, states: Mapping[str, UnitStates], streams: Mapping[StreamKey, torch.Tensor]
    ) -> None:
        """Restore the errors after the streams of `error_streams` were overwritten. Collective."""
        for name, buffers in self._buffers.items():
            comm = states[name].unit.comm
            buffers.is_current = False
            if (name, SERVER_ERROR) not in streams:
                continue
            parts = [streams[name, f"{WORKER_ERROR}.{rank}"] for rank in range(comm.world_size)]
            comm.exchange(buffers.worker_error, torch.cat(parts), label=name).wait()


def _mix(
    momentum: torch.Tensor, grads: torch.Tensor, start: int, stop: int, *, hyper: Hyper, scale: float
) -> None:
    """Compute `momentum = beta1 * momentum + (1 - beta1) * scale * gradient` of one whole parameter."""
    beta1 = hyper.betas[0]
    part = slice(start, stop)
    momentum[part].mul_(beta1).add_(grads[part], alpha=(1 - beta1) * scale)
