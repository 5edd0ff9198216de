"""Depth of the lists and objects in a JSON text, without parsing it.

The text is only searched in whole pieces: memory is proportional to a piece and time to the text, whatever
its content and depth. For a text that is not JSON, the depth is an upper bound of the depth that a parser
reaches before it notices.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import accumulate, count
from operator import sub

_PIECE = 1 << 16
_STRIDE = 1 << 12
_NO_BRACKET = bytes(set(range(256)) - set(b"{}[]"))
_STEPS = bytes.maketrans(b"{[}]", b"\2\2\0\0")


class Nesting:
    """Depth of a position in a text. The text comes in pieces; none may end within an escape sequence."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False

    def feed(self, text: bytes) -> None:
        outside = self._brackets(text)
        opened = outside.count(b"{") + outside.count(b"[")
        self.depth += 2 * opened - len(outside)

    def _brackets(self, text: bytes) -> bytes:
        """Return the brackets that are not part of a string."""
        if b"\\" in text:
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = text.split(b'"')
        outside = b"".join(parts[self.in_string :: 2])
        self.in_string ^= len(parts) % 2 == 0
        return outside.translate(None, _NO_BRACKET)

    def depths(self, text: bytes) -> tuple[int, int]:
        """Do the same as `feed`, and return the smallest and the greatest depth within the piece, both ends
        included."""
        outside = self._brackets(text).translate(_STEPS)
        before, levels = self.depth, [0, *map(sub, accumulate(outside), count(1))]
        self.depth += levels[-1]
        return before + min(levels), before + max(levels)


def depth_of(text: str | bytes | bytearray, *, limit: int = sys.maxsize) -> int:
    """Return the number of lists and objects around the innermost value; a scalar has depth 0.

    The result is exact up to `limit`. Of a deeper text only the part that proves this is read.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    nesting, found = Nesting(), 0
    for piece in pieces(data, 0, len(data)):
        found = max(found, nesting.depths(piece)[1])
        if found > limit:
            break
    return found


def skip_deep(nesting: Nesting, text: bytes, start: int, end: int, *, level: int) -> int:
    """Feed the text from `start` on, as long as all of it is deeper than `level`, and return where that ends,
    or up to _STRIDE earlier."""
    for piece in pieces(text, start, end, size=_STRIDE):
        before = nesting.depth, nesting.in_string
        if is_cut(piece) or nesting.depths(piece)[0] <= level:
            nesting.depth, nesting.in_string = before
            break
        start += len(piece)
    return start


def pieces(text: bytes | bytearray, start: int, end: int, *, size: int = 0) -> Iterator[bytes]:
    """Yield the text between two positions, in pieces that do not end within an escape sequence."""
    while start < end:
        piece = bytes(text[start : min(start + (size or _PIECE), end)])
        piece = piece[: len(piece) - is_cut(piece)] or piece
        yield piece
        start += len(piece)


def is_cut(piece: bytes) -> int:
    """Return 1 if the last byte begins an escape sequence, else 0."""
    return (len(piece) - len(piece.rstrip(b"\\"))) % 2
