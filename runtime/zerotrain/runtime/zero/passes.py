"""The current forward pass: which module was entered first, what is checked at the ends of a pass, and the
order of modules.

[Note: roots of passes] The outermost module entered is the root of its pass. Mostly that is the model. A
script, a method of the model (`model.loss(batch)`) or a wrapper may also call modules of it one after the
other. Their calls, and uses of parameters between them (`uses.py`), are one pass, which lasts until its
backward pass, the step, a call of the model itself or the next call of the module that it began with. Only
modules with hooks (`Boundary`) are seen; what a pass through other modules must not miss, the step checks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import nn

from zerotrain.runtime.zero.callers import is_running

if TYPE_CHECKING:
    from zerotrain.runtime.zero.hooks import Boundary
    from zerotrain.runtime.zero.sharded_model import ShardedModel

Item = TypeVar("Item")


class RecordedOrder(Generic[Item]):
    """Records one pass and predicts the next items from the one before, which training repeats almost always;
    a mismatch costs a prediction, nothing else."""

    def __init__(self) -> None:
        self._last: list[Item] = []
        self._now: list[Item] = []
        self._position = 0
        self.is_known = False
        """Whether `upcoming` is a prediction."""

    def begin(self) -> None:
        """Begin a new pass; the record of the previous one becomes the prediction."""
        if self._now:
            self._last = self._now
        self._now = []
        self._position = 0
        self.is_known = False

    def recorded(self) -> list[Item]:
        """Return the items of the last pass that visited any, in its order."""
        return list(self._now or self._last)

    def adopt(self, other: RecordedOrder[Item]) -> None:
        """Replace the last pass by the one that the other record holds."""
        self._now = other.recorded()

    def visit(self, item: Item) -> None:
        """Record an item."""
        self._now.append(item)
        try:
            self._position = self._last.index(item, self._position) + 1
            self.is_known = True
        except ValueError:
            self.is_known = False

    def upcoming(self) -> Iterator[Item]:
        """Return what followed the last visited item in the pass before; nothing if the item is new."""
        return islice(self._last, self._position, None) if self.is_known else iter(())


class Passes:
    """Passes of one model."""

    def __init__(self, core: ShardedModel) -> None:
        self._core = core
        self.entry: Boundary | None = None
        """Outermost boundary whose forward runs; None = none does."""
        self.is_checked = False
        """Whether, since the last step, a pass with gradients began and `EngineCallbacks.before_pass`
        was called."""
        self.expects_backward = False
        """Whether a pass with gradients began, and no backward pass has since."""
        self._goes_on = False
        """Whether the next module entered, unless it is the model, belongs to the last pass."""
        self._has_gradients = False
        self._first: Boundary | None = None
        self.trained: RecordedOrder[Boundary] = RecordedOrder()
        """Order of modules in training."""
        self._evaluated: RecordedOrder[Boundary] = RecordedOrder()
        self.order = self.trained
        """Order of the current pass."""
        self._expected: list[tuple[Boundary, int]] = []
        """Expected windows per boundary before an evaluation that keeps gradients."""

    def enter(self, boundary: Boundary) -> None:
        """Enter the forward of a boundary; called when no other boundary is known to run."""
        if self.entry is not None and is_running(self.entry.module):
            return  # the model calls itself, or one of its modules calls it
        if not (self.is_continued() and boundary.name and boundary is not self._first):
            self._begin(boundary)
        self._first = self._first or boundary
        self.entry = boundary

    def begin_use(self) -> None:
        """Begin a pass, unless one is running or continued, for a use of a parameter between calls of
        modules."""
        if self.entry is None and not self.is_continued():
            self._begin(None)

    def leave(self, *, keep: bool) -> None:
        """Leave the forward of the entry; `keep`: what lived through it is needed soon."""
        entry, self.entry = self.entry, None
        if entry is None or entry.name:
            return
        if sys.exc_info()[0] is None:  # else forward raised, maybe only on this rank: settle before backward
            self._core.updates.settle_units()
        self._goes_on = False
        self._core.live.end_forward(keep=keep)

    def abandon(self, module: nn.Module) -> None:
        """Leave the forward of a module that raised, if it is the entry or called it."""
        if self.entry is not None and (self.entry.module is module or not is_running(self.entry.module)):
            self.entry = None
            for boundary in self._core.boundaries.values():
                boundary.calls.clear()

    def begin_backward(self) -> None:
        """Note that autograd is about to run."""
        self.entry = None
        self._goes_on = self.expects_backward = False
        self._expected.clear()
        if self.order is self._evaluated and self._has_gradients:
            self.trained.adopt(self.order)  # a model that is trained in evaluation mode

    def end_step(self) -> None:
        """Note that the gradients were used or dropped."""
        self.entry = None
        self._goes_on = self.expects_backward = self.is_checked = False

    def check_stale(self) -> None:
        """Forget an entry whose forward raised, if the model looks busy."""
        if self.entry is not None and not is_running(self.entry.module):
            self.entry = None

    def is_continued(self) -> bool:
        """Return whether the next module or parameter used belongs to the previous pass."""
        return self._goes_on and self._has_gradients is torch.is_grad_enabled()

    def _begin(self, first: Boundary | None) -> None:
        core, has_gradients = self._core, torch.is_grad_enabled()
        core.drop_previous_pass()
        for boundary, windows in self._expected:
            boundary.expected_windows = windows
        self._expected.clear()
        self._first, self._goes_on, self._has_gradients = first, True, has_gradients
        is_training = has_gradients and core.model.training
        if has_gradients:
            if not core.has_gradients:
                core.callbacks.before_pass()
                self.is_checked = True
            if not is_training:
                self._expected = [(each, each.expected_windows) for each in core.boundaries.values()]
            self.expects_backward = True
        if not is_training:
            core.callbacks.on_evaluation()
        self.order = self.trained if is_training else self._evaluated
        self.order.begin()
