"""Muon (https://kellerjordan.github.io/posts/muon/) as torch.optim.Muon computes it, with AdamW for the
parameters that are no hidden matrices; see `muon_groups.py` for the rule.

The update of a matrix needs the whole matrix, and everything around it works element by element. So a step
has two parts. `prepare` computes what is to be made orthogonal from momenta and gradients, which it only
reads, and replaces it by the result (`orthogonal.py`). Then the update runs as that of any other rule, tile
by tile in every tier and also in the background: it updates the momentum, and the weight by its part of the
result. Until then the result of all matrices is in memory, in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

import torch

from zerotrain.contract.config import OptimizerConfig
from zerotrain.runtime.comm.streams import keep_for_current
from zerotrain.runtime.offload.states import Block
from zerotrain.runtime.optim.groups import Hyper
from zerotrain.runtime.optim.orthogonal import NewtonSchulz, SplitMatrix, orthogonalise
from zerotrain.runtime.optim.state_registry import StateRegistry
from zerotrain.runtime.optim.update import Kernel, Segment, TorchKernel, UnitUpdate, UpdateRule, tiles
from zerotrain.runtime.zero.gradients import UnitGradients
from zerotrain.runtime.zero.layout import Segment as Place
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.state import EXP_AVG, EXP_AVG_SQ

_DIRECTION = "direction"
"""Name under which a tile's part of the result is handed to `MatrixRule`, beside its states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixHyper(Hyper):
    """Hyperparameters of one matrix."""

    ratio: float
    """Factor of the rate for the matrix's shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixPart:
    """Elements `[start, stop)` of a unit's states that belong to one matrix."""

    start: int
    stop: int
    hyper: MatrixHyper
    direction: torch.Tensor
    """bf16, on the device that computes the model."""


class _TwoMoments(UpdateRule):
    """Base of Muon's rules, whose states are AdamW's. Those of whole units update by their kernels."""

    __slots__ = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the moments."""
        return (EXP_AVG, EXP_AVG_SQ)

    def update(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        hyper: Hyper,
        step: int,
    ) -> None:
        raise AssertionError("Muon updates whole units, by the kernels of the rule that `prepare` returns")


class MatrixRule(_TwoMoments):
    """The element-wise end of Muon's update, of tiles with a `_DIRECTION`."""

    __slots__ = ()

    def update(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        hyper: Hyper,
        step: int,
    ) -> None:
        assert isinstance(hyper, MatrixHyper)
        states[EXP_AVG].lerp_(grad, 1 - hyper.momentum)
        param.mul_(1 - hyper.lr * hyper.weight_decay)
        param.add_(states[_DIRECTION], alpha=-(hyper.lr * hyper.ratio))


class MuonKernel(Kernel):
    """The update of a unit: matrices by `MatrixRule`, the rest by the kernel of AdamW."""

    def __init__(self, adam: UpdateRule, unit: UnitUpdate, parts: Sequence[MatrixPart]) -> None:
        rest = [piece for segment in unit.segments for piece in _without(segment, parts)]
        self._rest = adam.kernel(replace(unit, segments=rest)) if rest else None
        self._parts = [
            (
                TorchKernel(
                    MatrixRule(),
                    replace(
                        unit,
                        segments=[Segment(start=part.start, stop=part.stop, hyper=part.hyper, step=1)],
                    ),
                ),
                replace(part, direction=part.direction.to(unit.grads.device)),
            )
            for part in parts
        ]
        for _, part in self._parts:
            keep_for_current(part.direction)  # its last reference goes when the kernel was launched

    def run(self, block: Block) -> None:
        if self._rest is not None:
            self._rest.run(block)
        for kernel, part in self._parts:
            low, high = max(block.start, part.start), min(block.stop, part.stop)
            if low < high:
                own = block.cut(slice(low - block.start, high - block.start))
                direction = part.direction[low - part.start : high - part.start]
                kernel.run(replace(own, by_kind={**own.by_kind, _DIRECTION: direction}))


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedMuon(_TwoMoments):
    """Muon for one step, whose matrices are orthogonal already."""

    adam: UpdateRule
    parts: dict[str, list[MatrixPart]]
    """Parts of matrices by unit; a unit's leave with its kernel, which then frees them."""
    num_bytes: int
    """Bytes of all results."""
    ledger: MemoryLedger

    def kernel(self, update: UnitUpdate) -> Kernel:
        """Return the kernel for the update of a unit."""
        parts = self.parts.pop(update.name)
        return MuonKernel(self.adam, update, parts) if parts else self.adam.kernel(update)

    def finish(self) -> None:
        """Account for the results as freed."""
        self.ledger.add(MemoryKind.REDUCE, -self.num_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonRule(_TwoMoments):
    """Muon; `adam` updates what is no matrix."""

    adam: UpdateRule
    nesterov: bool = True
    iterate: NewtonSchulz = field(default_factory=NewtonSchulz)
    adjust_lr_fn: str | None = None
    prepares: ClassVar[bool] = True

    @classmethod
    def of(cls, config: OptimizerConfig, adam: UpdateRule) -> MuonRule:
        """Return the rule of a configuration."""
        params = config.params
        a, b, c = params["ns_coefficients"]
        return cls(
            adam=adam,
            nesterov=bool(params["nesterov"]),
            iterate=NewtonSchulz(
                coefficients=(float(a), float(b), float(c)),
                steps=int(params["ns_steps"]),
                eps=float(params["ns_eps"]),
            ),
            adjust_lr_fn=params["adjust_lr_fn"],
        )

    def prepare(
        self,
        units: Sequence[UnitGradients],
        registry: StateRegistry,
        hypers: Sequence[Hyper],
        *,
        grad_scale: float,
        ledger: MemoryLedger,
    ) -> UpdateRule:
        """Make the matrices of a step orthogonal, and return the rule that updates with them. Collective."""
        if not units:
            return self.adam
        comm = units[0].unit.comm
        parts: dict[str, list[MatrixPart]] = {}
        split: list[SplitMatrix] = []
        for each in units:
            found = parts.setdefault(each.unit.name, [])
            for place in each.unit.layout.segments:
                hyper = hypers[registry.group_of[place.fqn]]
                if hyper.use_muon and len(place.shape) == 2:
                    part = self._part(each, registry, place, hyper, grad_scale)
                    found.append(part)
                    split.append(_split(each, place, part.direction))
        num_bytes = sum(matrix.own.nbytes for matrix in split)
        ledger.add(MemoryKind.REDUCE, num_bytes)
        if units[0].unit.placement.states_sharded:
            orthogonalise(split, self.iterate, comm)
        else:  # every rank has the whole matrices, and updates all of them
            for matrix in split:
                matrix.own.copy_(self.iterate(matrix.own.view(matrix.shape)).reshape(-1))
        return PreparedMuon(adam=self.adam, parts=parts, num_bytes=num_bytes, ledger=ledger)

    def _part(
        self, unit: UnitGradients, registry: StateRegistry, place: Place, hyper: Hyper, grad_scale: float
    ) -> MatrixPart:
        """Return this rank's part of a matrix, with what is to be made orthogonal."""
        states, grads = registry.states[unit.unit.name], unit.shard
        low, high = states.interval
        start, stop = max(low, place.start) - low, min(high, place.stop) - low
        stop = max(start, stop)
        device = unit.unit.comm.device
        direction = torch.empty(stop - start, dtype=torch.bfloat16, device=device)
        for tile in tiles(start, stop, states.device):
            grad = grads[tile].to(states.device)
            if grad_scale != 1.0:
                grad = grad * grad_scale
            momentum = states.peek(EXP_AVG, tile.start, tile.stop)
            average = momentum.lerp(grad, 1 - hyper.momentum)
            mixed = grad.lerp(average, hyper.momentum) if self.nesterov else average
            direction[tile.start - start : tile.stop - start].copy_(mixed)
        return MatrixPart(
            start=start,
            stop=stop,
            hyper=MatrixHyper(**asdict(hyper), ratio=rate_ratio(place.shape, self.adjust_lr_fn)),
            direction=direction,
        )


def rate_ratio(shape: Sequence[int], adjust_lr_fn: str | None) -> float:
    """Return the factor of a matrix's rate, as torch.optim.Muon: `original` for an update of about the same
    effect at every shape, `match_rms_adamw` for one of the size of AdamW's."""
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _split(unit: UnitGradients, place: Place, own: torch.Tensor) -> SplitMatrix:
    layout, comm = unit.unit.layout, unit.unit.comm
    shard = layout.padded_numel // comm.world_size
    sizes = tuple(
        max(0, min((rank + 1) * shard, place.stop) - max(rank * shard, place.start))
        for rank in range(comm.world_size)
    )
    rows, columns = place.shape
    return SplitMatrix(shape=(rows, columns), sizes=sizes, own=own)


def _without(segment: Segment, parts: Sequence[MatrixPart]) -> list[Segment]:
    """Return what remains of a segment outside of the parts, which are in order."""
    left, start = [], segment.start
    for part in parts:
        if part.stop <= start or part.start >= segment.stop or part.start == part.stop:
            continue
        if part.start > start:
            left.append(replace(segment, start=start, stop=part.start))
        start = part.stop
    if start < segment.stop:
        left.append(replace(segment, start=start))
    return left
