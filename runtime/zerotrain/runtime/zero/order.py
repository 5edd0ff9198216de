"""Guesses what comes next: the order of the last pass, which training repeats almost always."""

from __future__ import annotations

from typing import Generic, TypeVar

Item = TypeVar("Item")


class RecordedOrder(Generic[Item]):
    """Records one pass while predicting from the one before; a mismatch costs a prediction, nothing else."""

    def __init__(self) -> None:
        self._last: list[Item] = []
        self._now: list[Item] = []
        self._position = 0

    def begin(self) -> None:
        """A new pass starts; what the previous one recorded becomes the prediction."""
        if self._now:
            self._last = self._now
        self._now = []
        self._position = 0

    def visit(self, item: Item) -> Item | None:
        """Record an item and return the one that followed it last time, if any."""
        self._now.append(item)
        try:
            self._position = self._last.index(item, self._position) + 1
        except ValueError:
            return None
        return self._last[self._position] if self._position < len(self._last) else None
