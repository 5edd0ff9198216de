"""One optimizer step as something that can be carried out later, unit by unit, by another thread.

`ZeroOptimizer.begin_update` makes an `Update`, which holds every number of the step by value: a schedule or a
user may change the groups meanwhile. The step is written once, over the blocks that the state tiers hand out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from zerotrain.runtime.offload.states import Block, UnitStates
from zerotrain.runtime.offload.tiers import StateTiers
from zerotrain.runtime.optim.joint import JointRule, UnitUpdate
from zerotrain.runtime.optim.rules import Hyper, UpdateRule, WholeRunRule, tiles
from zerotrain.runtime.zero.gradients import UnitGradients
from zerotrain.runtime.zero.rounding import join, split


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentStep:
    """Elements `[start, stop)` of a unit's states that this step updates alike."""

    start: int
    stop: int
    hyper: Hyper
    step: int
    """Updates of these elements, this one included."""


class UnitKernel:
    """The update of one unit's elements: a `BlockUpdate`."""

    def __init__(
        self,
        rule: UpdateRule,
        segments: Sequence[SegmentStep],
        grads: Callable[[torch.device], torch.Tensor],
        *,
        grad_scale: float,
    ) -> None:
        """`grads`: the gradient of the unit's states on a device; it may be overwritten."""
        self.rule = rule
        self.segments = segments
        self.grads = grads
        self.grad_scale = grad_scale

    def __call__(self, block: Block) -> None:
        """Update a block in place."""
        first = next(t for t in (block.master, block.remainder) if t is not None)
        grads = self.grads(first.device)[block.start : block.stop]
        for segment in self.segments:
            low, high = max(block.start, segment.start), min(block.stop, segment.stop)
            if low < high:
                part = slice(low - block.start, high - block.start)
                self._update(_cut(block, part), grads[part], segment)

    def _update(self, part: Block, grads: torch.Tensor, segment: SegmentStep) -> None:
        rule = self.rule
        runs_whole = isinstance(rule, WholeRunRule) and rule.runs_on(grads.device)
        if runs_whole and (part.remainder is None or rule.takes_remainders):  # type: ignore[attr-defined]
            self._run_whole(part, grads, segment)
            return
        for tile in tiles(0, part.stop - part.start, grads.device):
            self._update_tile(_cut(part, tile), grads[tile], segment)

    def _run_whole(self, part: Block, grads: torch.Tensor, segment: SegmentStep) -> None:
        """By a rule that does the clipping, the update and the rounding of the weights in one pass."""
        assert isinstance(self.rule, WholeRunRule)
        further = {} if part.remainder is None else {"remainder": part.remainder}
        written = self.rule.update_run(
            part.master,
            grads,
            part.by_kind,
            segment.hyper,
            segment.step,
            grad_scale=self.grad_scale,
            weight=part.weight,
            **further,
        )
        if not written and part.weight is not None and part.master is not None:
            part.weight.copy_(part.master)

    def _update_tile(self, tile: Block, grad: torch.Tensor, segment: SegmentStep) -> None:
        """With the rule's own operations, on a master that is made for it where none is stored."""
        rule, master = self.rule, tile.master
        if master is None:
            assert tile.weight is not None and tile.remainder is not None
            master = join(tile.weight, tile.remainder)
        if isinstance(rule, WholeRunRule) and rule.runs_on(grad.device):
            scale = self.grad_scale
            rule.update_run(
                master, grad, tile.by_kind, segment.hyper, segment.step, grad_scale=scale, weight=None
            )
        else:
            if self.grad_scale != 1.0:
                grad.mul_(self.grad_scale)
            rule.update(master, grad, tile.by_kind, segment.hyper, segment.step)
        if tile.remainder is not None and tile.weight is not None:
            high, low = split(master)
            tile.weight.copy_(high)
            tile.remainder.copy_(low)
        elif tile.weight is not None:
            tile.weight.copy_(master)


class Update:
    """One step of an element-wise rule. `run` every unit of `order`, in that order, then `finish`."""

    is_collective = False
    """Whether `finish` talks to the other ranks."""

    def __init__(
        self,
        tiers: StateTiers,
        states: Mapping[str, UnitStates],
        kernels: Mapping[str, UnitKernel],
    ) -> None:
        """`kernels` of the units to be updated, in forward order."""
        self.order = tuple(kernels)
        """Names of units, in the order of forward."""
        self._states, self._kernels = states, dict(kernels)
        self._pass = tiers.open_pass([states[name] for name in kernels])

    @torch.no_grad()
    def run(self, name: str) -> None:
        """Update masters, states and weights of one unit. Any one thread; no communication."""
        self._pass.update(self._states[name], self._kernels.pop(name))

    def finish(self) -> None:
        """Wait until everything is stored. Raises what went wrong."""
        self._pass.close()


class JointUpdate:
    """One step of a rule that needs all units at once: nothing can be done before `finish`."""

    is_collective = True
    order: tuple[str, ...] = ()

    def __init__(
        self, rule: JointRule, units: Sequence[UnitUpdate], *, step: int, grad_scale: float
    ) -> None:
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


def gradients_on(part: UnitGradients) -> Callable[[torch.device], torch.Tensor]:
    """A unit's gradients where its states are updated."""

    def on(device: torch.device) -> torch.Tensor:
        return part.shard.to(device)

    return on


def _cut(block: Block, part: slice) -> Block:
    def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[part]

    return Block(
        start=block.start + part.start,
        stop=block.start + part.stop,
        master=cut(block.master),
        remainder=cut(block.remainder),
        by_kind={kind: state[part] for kind, state in block.by_kind.items()},
        weight=cut(block.weight),
    )
