"""A corpus: one long sequence of token ids that is read in slices; text files are never held in memory.

Text is bytes: every byte is a token, and files are joined by one zero byte, which text does not contain. A
corpus stores only where its files begin; a slice is read from the page cache on demand.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zerotrain.runtime.data.errors import DataError

SEPARATOR = 0
"""Token between two files."""

MAX_OPEN_FILES = 64


class Corpus(Protocol):
    """A sequence of token ids."""

    num_tokens: int
    fingerprint: str
    """Hash that is equal for equal contents (names and sizes of files); a resumed run compares it."""
    notices: tuple[str, ...]
    """Descriptions of skipped files, for the log."""

    def read(self, start: int, length: int) -> NDArray[np.int64]:
        """Return the ids `[start, start + length)`. Raises DataError when the file behind them cannot be
        read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFile:
    """One file of a text corpus."""

    path: Path
    size: int


class TextCorpus:
    """The bytes of files, in the given order, each followed by SEPARATOR."""

    def __init__(self, files: Sequence[TextFile], *, root: Path, notices: tuple[str, ...] = ()) -> None:
        self._files = tuple(files)
        self._starts = [0, *itertools.accumulate(file.size + 1 for file in files)]
        self._open: dict[int, int] = {}
        self.num_tokens = self._starts[-1]
        self.notices = notices
        self.fingerprint = _fingerprint((os.path.relpath(file.path, root), file.size) for file in files)

    def read(self, start: int, length: int) -> NDArray[np.int64]:
        ids = np.full(length, SEPARATOR, dtype=np.int64)
        done = 0
        index = bisect.bisect_right(self._starts, start) - 1
        while done < length:
            offset = start + done - self._starts[index]
            count = min(length - done, self._files[index].size - offset)
            if count > 0:
                ids[done : done + count] = np.frombuffer(self._bytes(index, offset, count), dtype=np.uint8)
            done += max(count, 0) + 1
            index += 1
        return ids

    def close(self) -> None:
        """Close the open files; reading opens them again."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _bytes(self, index: int, offset: int, count: int) -> bytes:
        file = self._files[index]
        try:
            data = os.pread(self._descriptor(index), count, offset)
        except OSError as error:
            raise DataError.unreadable(f"data file {file.path}", error) from error
        if len(data) != count:
            raise DataError(
                f"data file {file.path} has fewer than its {file.size} bytes now; "
                "data must not change during a run"
            )
        return data

    def _descriptor(self, index: int) -> int:
        if index not in self._open:
            while len(self._open) >= MAX_OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[index] = os.open(self._files[index].path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[index]


class ArrayCorpus:
    """Ids of an array: a memory-mapped file of token ids, or text that is small enough to hold in memory."""

    def __init__(
        self, ids: NDArray[np.generic], *, fingerprint: Sequence[object], notices: tuple[str, ...] = ()
    ) -> None:
        self._ids = ids
        self.num_tokens = len(ids)
        self.notices = notices
        self.fingerprint = _fingerprint([tuple(fingerprint)])

    def read(self, start: int, length: int) -> NDArray[np.int64]:
        return self._ids[start : start + length].astype(np.int64)


def _fingerprint(facts: object) -> str:
    digest = hashlib.sha256()
    for fact in facts:  # type: ignore[attr-defined]
        digest.update(repr(fact).encode())
    return digest.hexdigest()[:16]
