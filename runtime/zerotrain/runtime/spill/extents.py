"""Allocation of the spill file's bytes. No I/O here."""

from __future__ import annotations


class Extents:
    """First-fit allocator over the ranges that forgotten records left, else at the end."""

    def __init__(self) -> None:
        self.end = 0
        """Bytes that the file must have."""
        # Free ranges as (offset, bytes), sorted by offset, never adjacent, never at the end.
        self._free: list[tuple[int, int]] = []

    def take(self, num_bytes: int) -> int:
        """Allocate a range of that many bytes and return its offset."""
        for index, (offset, size) in enumerate(self._free):
            if size >= num_bytes:
                rest = (offset + num_bytes, size - num_bytes)
                self._free[index : index + 1] = [rest] if rest[1] else []
                return offset
        offset = self.end
        self.end += num_bytes
        return offset

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Free a range, so that it may be allocated again."""
        merged: list[tuple[int, int]] = []
        for start, size in sorted([*self._free, (offset, num_bytes)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged
        if merged and sum(merged[-1]) == self.end:
            self.end = merged.pop()[0]
