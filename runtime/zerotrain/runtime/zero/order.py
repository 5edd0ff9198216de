"""Predicts the next items from the order of the last pass, which training repeats almost always."""

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
        """Begin a new pass; the record of the previous one becomes the prediction."""
        if self._now:
            self._last = self._now
        self._now = []
        self._position = 0
        self._is_known = False

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
            self._is_known = True
        except ValueError:
            self._is_known = False

    def upcoming(self) -> Iterator[Item]:
        """Return what followed the last visited item in the pass before; nothing if the item is new."""
        return islice(self._last, self._position, None) if self._is_known else iter(())

    @property
    def is_known(self) -> bool:
        """Whether `upcoming` is a prediction."""
        return self._is_known
