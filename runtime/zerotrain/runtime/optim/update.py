"""One optimizer step as an object that can be carried out later, unit by unit, by another thread.

`ZeroOptimizer.begin_update` makes an `Update`, which holds every number of the step by value: a schedule or a
user may change the groups meanwhile. The step is written once, over the blocks that the state tiers provide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerotrain.runtime.offload.device import ResidentStates
from zerotrain.runtime.offload.states import Block, Encoding, UnitStates
from zerotrain.runtime.offload.tiers import StateTiers
from zerotrain.runtime.optim.joint import JointRule, JointUnit, SegmentRun
from zerotrain.runtime.optim.rules import Hyper, Kernel, KernelRule, UnitStep, UpdateRule, tiles
from zerotrain.runtime.optim.state_registry import StateRegistry
from zerotrain.runtime.zero.gradients import UnitGradients, shard_on
from zerotrain.runtime.zero.rounding import join, split


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentStep:
    """Elements `[start, stop)` of a unit's states that this step updates alike."""

    start: int
    stop: int
    hyper: Hyper
    step: int
    """Number of updates of these elements, this one included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitKernel:
    """The update of one unit, by value except for its gradients: a `UnitUpdate`."""

    rule: UpdateRule
    segments: Sequence[SegmentStep]
    part: UnitGradients
    grad_scale: float

    def bind(self, weights: torch.Tensor, encoding: Encoding) -> BoundUpdate:
        """Bind the update to weights of the states' interval, on the device where the states are updated."""
        grads, rule = shard_on(self.part, weights.device), self.rule
        kernel = rule.kernel_for(weights.device) if isinstance(rule, KernelRule) else None
        if kernel is None:
            return BoundUpdate(update=self, grads=grads)
        stored = encoding.stored
        step = UnitStep(
            segments=self.segments,
            grad=grads,
            grad_scale=self.grad_scale,
            weight=weights,
            names=rule.kinds if stored is None else (stored, *rule.kinds),
        )
        return BoundUpdate(update=self, grads=grads, kernel=kernel, task=kernel.task(step))


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundUpdate:
    """The update of one unit with its weights: a `BlockUpdate`."""

    update: UnitKernel
    grads: torch.Tensor
    kernel: Kernel | None = None
    task: Any | None = None
    """Task of the kernel."""

    def __call__(self, block: Block) -> None:
        """Update a block in place."""
        if self.kernel is not None:
            is_master = block.weight is None
            first = block.remainder if block.master is None or is_master else block.master
            self.kernel.run(self.task, first, block.by_kind, start=block.start)
            return
        for segment in self.update.segments:
            low, high = max(block.start, segment.start), min(block.stop, segment.stop)
            decodes, device = block.remainder is not None, self.grads.device
            for tile in tiles(low - block.start, high - block.start, device, decodes=decodes):
                self._update_tile(cut(block, tile), segment)

    def _update_tile(self, tile: Block, segment: SegmentStep) -> None:
        """Update a tile with torch's operations, on a master that is made for it where none is stored."""
        grad, master, weight = self.grads[tile.start : tile.stop], tile.master, tile.weight
        if self.update.grad_scale != 1.0:
            grad.mul_(self.update.grad_scale)
        if tile.remainder is None:
            assert master is not None
            self.update.rule.update(master, grad, tile.by_kind, segment.hyper, segment.step)
            if weight is not None:
                weight.copy_(master)
            return
        assert weight is not None
        master = join(weight, tile.remainder)
        self.update.rule.update(master, grad, tile.by_kind, segment.hyper, segment.step)
        for target, half in zip((weight, tile.remainder), split(master), strict=True):
            target.copy_(half)


class Update:
    """One step of an element-wise rule. Call `run` for every unit of `order`, in order, then `finish`."""

    is_collective = False
    """Whether `finish` communicates with the other ranks."""

    def __init__(
        self,
        tiers: StateTiers,
        states: Mapping[str, UnitStates],
        kernels: Mapping[str, UnitKernel],
    ) -> None:
        """Open a pass over the units of `kernels`, which are in forward order."""
        self.order = tuple(kernels)
        """Names of the units to be updated, in forward order."""
        self._states, self._kernels = states, dict(kernels)
        self._pass = tiers.open_pass([states[name] for name in kernels])

    @torch.no_grad()
    def run(self, name: str) -> None:
        """Update masters, states and weights of one unit. Any one thread; no communication."""
        self._pass.update(self._states[name], self._kernels.pop(name))

    def finish(self) -> None:
        """Wait until everything is stored. Raises the first error."""
        self._pass.close()


class JointUpdate:
    """One step of a rule that needs all units at once: nothing can be done before `finish`."""

    is_collective = True
    order: tuple[str, ...] = ()

    def __init__(self, rule: JointRule, units: Sequence[JointUnit], *, step: int, grad_scale: float) -> None:
        self._rule, self._units = rule, units
        self._step, self._grad_scale = step, grad_scale

    def run(self, name: str) -> None:
        """Raise KeyError: there is no unit to run."""
        raise KeyError(name)

    @torch.no_grad()
    def finish(self) -> None:
        """Update all units. Collective."""
        self._rule.update_units(self._units, self._step, grad_scale=self._grad_scale)
        for unit in self._units:
            unit.states.round_weights()


def joint_unit(part: UnitGradients, registry: StateRegistry, hypers: Sequence[Hyper]) -> JointUnit:
    """Return the input of one unit for a rule that works on all units together; `hypers` by group."""
    states = registry.states[part.unit.name]
    assert isinstance(states, ResidentStates)
    low, high = states.interval
    segments = tuple(
        SegmentRun(
            fqn=segment.fqn,
            start=max(low, segment.start) - low,
            stop=min(high, segment.stop) - low,
            group=registry.group_of[segment.fqn],
            hyper=hypers[registry.group_of[segment.fqn]],
        )
        for segment in part.unit.layout.segments
    )
    return JointUnit(states=states, grads=part.shard, accumulator=part.accumulator, segments=segments)


def cut(block: Block, part: slice) -> Block:
    """Return a part of a block, by positions within it."""

    def of(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[part]

    return Block(
        start=block.start + part.start,
        stop=block.start + part.stop,
        master=of(block.master),
        remainder=of(block.remainder),
        by_kind={kind: state[part] for kind, state in block.by_kind.items()},
        weight=of(block.weight),
    )
