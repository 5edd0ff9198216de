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

[Note: signs] Elements are compressed to their signs, with one fp32 scale per block. A block has 2,048
elements, the unit in which shards are cut, so a rank's part is compressed on its own and no block crosses
ranks. The scale is the root mean square of the block's real elements; gaps between parameters are zeros and
come out as zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from zerotrain.contract.config import OptimizerConfig
from zerotrain.runtime.offload.resident import ResidentStates
from zerotrain.runtime.offload.states import UnitStates
from zerotrain.runtime.optim.joint import JointUnit, ParameterRun
from zerotrain.runtime.optim.update import tiles
from zerotrain.runtime.zero.buffer import flat_zeros
from zerotrain.runtime.zero.layout import ALIGN, UnitLayout
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.state import EXP_AVG, EXP_AVG_SQ, SERVER_ERROR, WORKER_ERROR, StreamKey

BLOCK = ALIGN
"""Number of elements that share a scale."""

_TILE_BLOCKS, _CUDA_TILE_BLOCKS = 64, 1 << 13
"""Number of blocks processed at a time; on CUDA launches cost more than cache misses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSigns:
    """A compressed flat tensor; see [Note: signs]. `bits` holds 8 elements per byte, `scales` one fp32 per
    block."""

    bits: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, numel: int, device: torch.device) -> PackedSigns:
        """Allocate signs for `numel` elements, a multiple of the block."""
        return cls(
            bits=torch.empty(numel // 8, dtype=torch.uint8, device=device),
            scales=torch.empty(numel // BLOCK, dtype=torch.float32, device=device),
        )

    def framed(self, parts: int) -> torch.Tensor:
        """Return the signs as bytes, cut in equal parts of which each has its bits and then its scales."""
        rows = self.bits.view(parts, -1), self.scales.view(torch.uint8).view(parts, -1)
        return torch.cat(rows, dim=1).flatten()

    @classmethod
    def unframed(cls, frame: torch.Tensor, parts: int) -> PackedSigns:
        """Restore signs from the bytes of `framed`."""
        rows = frame.view(parts, -1)
        blocks = rows.shape[1] // (BLOCK // 8 + 4)
        return cls(
            bits=rows[:, : blocks * BLOCK // 8].flatten(),
            scales=rows[:, blocks * BLOCK // 8 :].flatten().view(torch.float32),
        )

    def part(self, index: int, parts: int) -> PackedSigns:
        """Return one of `parts` equal parts."""
        return PackedSigns(bits=self.bits.view(parts, -1)[index], scales=self.scales.view(parts, -1)[index])

    def add_to(self, target: torch.Tensor, *, weight: float) -> None:
        """Compute `target += weight * self`; gaps get values too, see `SignCodec.clear_gaps`."""
        rows, packed = target.view(-1, BLOCK), self.bits.view(-1, BLOCK // 8)
        weights = _bit_weights(target.device)
        for tile in _tiles(rows):
            positive = (packed[tile][..., None] & weights).ne(0).view(rows[tile].shape)
            scale = self.scales[tile][:, None]
            rows[tile].add_(torch.where(positive, scale, -scale), alpha=weight)


class SignCodec:
    """Compressor of flat tensors that cover the elements `[start, stop)` of a unit, in whole blocks."""

    def __init__(self, layout: UnitLayout, start: int, stop: int, device: torch.device) -> None:
        self._gaps = _gaps(layout, start, stop)
        real = torch.ones(stop - start, device=device)
        self.clear_gaps(real)
        self._counts = real.view(-1, BLOCK).sum(dim=1).clamp_(min=1.0)

    def clear_gaps(self, flat: torch.Tensor) -> None:
        """Zero the elements between and behind parameters."""
        for gap in self._gaps:
            flat[gap].zero_()

    def pack(self, value: torch.Tensor) -> PackedSigns:
        """Compress `value`, and leave in it the error of the compression."""
        signs = PackedSigns.empty(value.numel(), value.device)
        rows, packed = value.view(-1, BLOCK), signs.bits.view(-1, BLOCK // 8)
        weights = _bit_weights(value.device)
        for tile in _tiles(rows):
            part = rows[tile]
            scale = part.square().sum(dim=1).div_(self._counts[tile]).sqrt_()
            signs.scales[tile] = scale
            positive = part >= 0
            octets = positive.view(*packed[tile].shape, 8) * weights
            packed[tile] = octets.sum(dim=-1, dtype=torch.uint8)
            part.sub_(torch.where(positive, scale[:, None], -scale[:, None]))
        self.clear_gaps(value)
        return signs


def _bit_weights(device: torch.device) -> torch.Tensor:
    return torch.bitwise_left_shift(
        torch.ones(8, dtype=torch.uint8, device=device), torch.arange(8, dtype=torch.uint8, device=device)
    )


def _tiles(rows: torch.Tensor) -> Sequence[slice]:
    count, size = rows.shape[0], _TILE_BLOCKS if rows.device.type == "cpu" else _CUDA_TILE_BLOCKS
    return [slice(low, min(low + size, count)) for low in range(0, count, size)]


def _gaps(layout: UnitLayout, start: int, stop: int) -> list[slice]:
    gaps, end = [], 0
    for low, high in [*((part.start, part.stop) for part in layout.segments), (layout.padded_numel, 0)]:
        first, last = max(end, start), min(low, stop)
        if first < last:
            gaps.append(slice(first - start, last - start))
        end = high
    return gaps


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
            own, beta1 = slice(part.start, part.stop), hypers[part.fqn].betas[0]
            momentum[own].mul_(beta1).add_(update.accumulator[own], alpha=(1 - beta1) * scale)
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
