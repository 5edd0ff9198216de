"""Guesses what comes next: the order of the last pass, which training repeats almost always."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

Item = TypeVar("Item")


class RecordedOrder(Generic[Item]):
    """Records one pass while predicting from the one before; a mismatch costs a prediction, nothing else."""

    def __init__(self) -> None:
        self._last: list[Item] = []
        self._now: list[Item] = []
        self._position = 0
        self._is_known = False

    def begin(self) -> None:
        """A new pass starts; what the previous one recorded becomes the prediction."""
        if self._now:
            self._last = self._now
        self._now = []
        self._position = 0
        self._is_known = False

    def recorded(self) -> list[Item]:
        """The items of the last pass that visited any, in its order."""
        return list(self._now or self._last)

    def adopt(self, other: RecordedOrder[Item]) -> None:
        """The last pass was the one that the other record holds."""
        self._now = other.recorded()

    def visit(self, item: Item) -> None:
        """Record an item."""
        self._now.append(item)
        try:
            self._position = self._last.index(item, self._position) + 1
            self._is_known = True
        except ValueError:
            self._is_known = False

    def upcoming(self) -> Iterator[Item]:
        """What followed the last item that was visited, in the pass before; nothing where it is new."""
        return islice(self._last, self._position, None) if self._is_known else iter(())

    @property
    def is_known(self) -> bool:
        """Whether `upcoming` is a prediction."""
        return self._is_known
