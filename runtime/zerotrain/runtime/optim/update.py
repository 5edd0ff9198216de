"""The update of a step, of one unit in it, and of a block of the unit's elements.

`StepExecutor` makes a `StepUpdate` and runs it, unit by unit. It holds every number of the step by value: a
schedule or a user may change the groups meanwhile, and another thread may run it. For each unit the
`UpdateRule` makes a `Kernel`, which updates the unit's states block by block, as their tier provides them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Self, cast

import torch

from zerotrain.runtime.offload.resident import ResidentStates
from zerotrain.runtime.offload.states import Block, Encoding
from zerotrain.runtime.optim.device_scale import GradScale, on_host
from zerotrain.runtime.optim.groups import Hyper
from zerotrain.runtime.optim.state_registry import StateRegistry
from zerotrain.runtime.zero.gradients import UnitGradients, shard_on
from zerotrain.runtime.zero.ledger import MemoryLedger
from zerotrain.runtime.zero.rounding import join, split

if TYPE_CHECKING:  # compiled code
    from zerotrain.runtime._native import UpdateTask
    from zerotrain.runtime.offload.spilled import SpillStates

TILE = 1 << 17
"""Number of elements of a tile on CPU: four fp32 streams and a temporary stay in a core's cache."""
CUDA_TILE = 1 << 24
"""Number of elements of a tile on CUDA, where launches cost more than cache misses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Elements `[start, stop)` of a unit's states that a step updates alike."""

    start: int
    stop: int
    hyper: Hyper
    step: int
    """Number of updates of these elements, this one included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitUpdate:
    """The update of one unit in one step, without the states, which a kernel gets block by block."""

    segments: Sequence[Segment]
    grads: torch.Tensor
    """The gradients of all elements of the states, 1-D; a kernel may overwrite them."""
    grad_scale: GradScale
    weights: torch.Tensor
    """Weights of the same elements, on the same device."""
    writes_masters: bool = False
    """Whether the weights are the masters themselves."""
    state_dtype: torch.dtype = torch.float32
    """Dtype in which the states are kept."""
    name: str = ""
    """Name of the unit."""


class Kernel(ABC):
    """The computation of one `UnitUpdate`, with the same bits for every cut into blocks."""

    task: UpdateTask | None = None
    """The same update as a native task over all elements of the unit, if there is one: a tile of sealed
    states can then be opened, updated and sealed in one pass."""

    @abstractmethod
    def run(self, block: Block) -> None:
        """Update a block in place."""


class UpdateRule(ABC):
    """An optimizer that works element by element and has no tensors of its own."""

    __slots__ = ()

    prepares: ClassVar[bool] = False
    """Whether `prepare` must be called at every step."""
    takes_device_scale: ClassVar[bool] = False
    """Whether its kernels beside the CPU's take a `DeviceScale`."""

    @property
    @abstractmethod
    def kinds(self) -> tuple[str, ...]:
        """State streams per element beside the master weight; they start as zeros."""

    @abstractmethod
    def update(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        hyper: Hyper,
        step: int,
    ) -> None:
        """Update `param` and `states` in place; `grad` may be overwritten. `step` counts from 1."""

    def prepare(
        self,
        units: Sequence[UnitGradients],
        registry: StateRegistry,
        hypers: Sequence[Hyper],
        *,
        grad_scale: float,
        ledger: MemoryLedger,
    ) -> UpdateRule:
        """Return the rule for the update of these units in this step, for an optimizer that needs more than
        single elements. Collective; it changes no states."""
        return self

    def finish(self) -> None:  # noqa: B027  # most rules prepare nothing
        """Release what `prepare` made. Called after the last unit of a step."""

    def kernel(self, update: UnitUpdate) -> Kernel:
        """Return the kernel for the update of a unit: `update` in tiles, where there is no faster one."""
        return TorchKernel(self, update)


class TorchKernel(Kernel):
    """The update by torch's operations, in tiles. Where a tile has no fp32 master, one is made for it, and so
    are fp32 copies of states in bf16. What is stored in bf16 is rounded once, to nearest, ties to even."""

    def __init__(self, rule: UpdateRule, unit: UnitUpdate) -> None:
        self.rule = rule
        self.unit = unit

    def run(self, block: Block) -> None:
        for segment in self.unit.segments:
            low, high = max(block.start, segment.start), min(block.stop, segment.stop)
            device = self.unit.grads.device
            decodes = block.master is None or block.master.dtype is not torch.float32
            for tile in tiles(low - block.start, high - block.start, device, decodes=decodes):
                part = block.cut(tile)
                grad = self.unit.grads[part.start : part.stop]
                if part.master is not None and part.master.dtype is torch.bfloat16:
                    self._update_bf16(part.master, grad, part.by_kind, segment)
                    continue
                if part.remainder is None:
                    assert part.master is not None
                    self.update(part.master, grad, part.by_kind, segment)
                    if part.weight is not None:
                        part.weight.copy_(part.master)
                    continue
                assert part.weight is not None
                master = join(part.weight, part.remainder)
                self.update(master, grad, part.by_kind, segment)
                for target, half in zip((part.weight, part.remainder), split(master), strict=True):
                    target.copy_(half)

    def _update_bf16(
        self, master: torch.Tensor, grad: torch.Tensor, states: Mapping[str, torch.Tensor], segment: Segment
    ) -> None:
        """Update masters in bf16, with states in either dtype, in fp32 copies."""
        wide, kept = master.float(), {kind: state.float() for kind, state in states.items()}
        self.update(wide, grad.float(), kept, segment)
        master.copy_(wide)
        for kind, state in states.items():
            if state is not kept[kind]:
                state.copy_(kept[kind])

    def update(
        self, master: torch.Tensor, grad: torch.Tensor, states: Mapping[str, torch.Tensor], segment: Segment
    ) -> None:
        """Update masters and states of a tile in place."""
        if (scale := on_host(self.unit.grad_scale)) != 1.0:
            grad.mul_(scale)
        self.rule.update(master, grad, states, segment.hyper, segment.step)


class StepUpdate:
    """The update of one step by an element-wise rule. Call `run` for every unit of `order`, in order, then
    `finish`, which the end of its context calls as well. One thread at a time; no communication."""

    def __init__(
        self,
        rule: UpdateRule,
        registry: StateRegistry,
        parts: Sequence[UnitGradients],
        hypers: Sequence[Hyper],
        *,
        step: int,
        grad_scale: GradScale,
    ) -> None:
        """Copy the numbers for the units of `parts`, which are in forward order; `hypers` by group. The
        gradients are read when a unit is updated, and overwritten."""
        self.order = tuple(part.unit.name for part in parts)
        """Names of the units to be updated, in forward order."""
        self._rule, self._grad_scale = rule, grad_scale
        self._parts = dict(zip(self.order, parts, strict=True))
        self._segments = {
            name: [
                Segment(start=run.start, stop=run.stop, hyper=hypers[run.group], step=step - run.born)
                for run in registry.runs[name]
            ]
            for name in self.order
        }
        self._states = registry.states
        self._sweep = registry.tiers.open_sweep([registry.states[name] for name in self.order])

    @torch.no_grad()
    def run(self, name: str) -> None:
        """Update masters, states and weights of one unit. After an error the step cannot go on."""
        states, part = self._states[name], self._parts.pop(name)
        try:
            with states.weights_to_update() as weights:
                kernel = self._rule.kernel(
                    UnitUpdate(
                        name=name,
                        segments=self._segments[name],
                        grads=shard_on(part, weights.device),
                        grad_scale=self._grad_scale,
                        weights=weights,
                        writes_masters=states.encoding is Encoding.WEIGHT,
                        state_dtype=states.unit.placement.state_dtype,
                    )
                )
                if isinstance(states, ResidentStates):
                    kernel.run(states.block(weights))
                    return
                assert self._sweep is not None
                spilled = cast("SpillStates", states)
                for tile in self._sweep.tiles(spilled):
                    if kernel.task is not None:
                        tile.update(kernel.task)
                        continue
                    for block in spilled.open_blocks(tile, weights):
                        kernel.run(block)
        except BaseException as error:
            if self._sweep is not None:
                self._sweep.end(error)
            raise

    def finish(self) -> None:
        """Wait until everything is stored. Raises the first error."""
        if self._sweep is not None:
            self._sweep.end()
        self._rule.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
            return
        with suppress(Exception):  # the first error is the one that counts
            self.finish()


def tiles(start: int, stop: int, device: torch.device, *, decodes: bool = False) -> Iterator[slice]:
    """Cut `[start, stop)` into slices that fit the cache of the device. `decodes`: the caller has several
    fp32 temporaries, which must not take much of a device's memory."""
    size = CUDA_TILE if device.type == "cuda" else TILE
    size = size // 8 if decodes else size
    for low in range(start, stop, size):
        yield slice(low, min(low + size, stop))
