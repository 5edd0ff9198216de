"""Bounded reading of JSON texts, and their separation at the outermost levels without parsing the rest.

Free-form JSON of an untrusted author may be megabytes of empty lists (fifty times as much in Python) or
nested deeper than any parser accepts. Here the text is only searched in whole pieces, so memory and time
depend on nothing but its length. The texts are valid JSON on one line, as an API server writes it. For any
other text the parts that are found are not JSON, and their reader reports that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from zerotrain.contract.json_depth import Nesting, is_cut, pieces, skip_deep
from zerotrain.contract.strict_json import strict_json

MAX_DEPTH = 512
"""Deepest nesting of lists and objects that is read. Typed objects have a tenth of that."""

_MISSES = 64
"""Places that are found too deep before the text is searched for the end of that depth.

A free-form part may hold a hundred thousand of them, and each costs as much as a kilobyte without any.
"""


def read_json(text: bytes) -> Any:
    """Return the value of a text of any length that the API server sent.

    Raises JsonError if it is not JSON or too deep for its readers.
    """
    return strict_json(text, max_bytes=len(text), max_depth=MAX_DEPTH, finite=False)


def members(text: bytes, names: Sequence[str]) -> dict[str, bytes]:
    """Return the texts of an object's values by name, in their order.

    `names` must be all that the object may have: the value before any other name would not end at the correct
    position.
    """
    either = "|".join(re.escape(name) for name in names).encode()
    name, nesting = re.compile(rb'[{,] ?"(' + either + rb')":'), Nesting()
    at, found, misses = 0, list[tuple[str, int, int]](), 0
    while match := name.search(text, at):
        for piece in pieces(text, at, match.start() + 1):
            nesting.feed(piece)
        at = match.start() + 1
        if nesting.depth == 1 and not nesting.in_string:
            found.append((match[1].decode(), match.start(), match.end()))
        elif (misses := misses + 1) % _MISSES == 0:
            at = skip_deep(nesting, text, at, len(text), level=1)
    ends = [start for _, start, _ in found] + [len(text.rstrip()) - 1]
    return {name: text[begin:end] for (name, _, begin), end in zip(found, ends[1:], strict=True)}


_FIRST = rb' ?"(?:apiVersion|kind|metadata)":'
_BETWEEN = re.compile(rb"\}(?:, ?(?=\{" + _FIRST + rb")|\](?=," + _FIRST + rb"))")
"""Pattern after an item: the next item, or the rest of a list that ends with its metadata."""
_LONGEST = 32
"""Length of the longest match of that pattern, or of the beginning of the items, in characters."""
_ITEMS = re.compile(rb'[{,] ?"items": ?\[')


class ItemSplitter:
    """Splitter of a Kubernetes list into the texts of its items, while the list still arrives.

    It holds no more than one item. `feed` it the list piece by piece and `finish` it; `envelope` is then the
    list without its items.
    """

    def __init__(self) -> None:
        self._text = b""
        self._from = 0
        """Offset before which the text has been returned."""
        self._nesting, self._seen, self._misses = Nesting(), 0, 0
        """Nesting of the text up to the offset `_seen`."""
        self._find = self._find_items
        self._envelope = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the items that are complete by now."""
        self._text = self._text[self._from :] + piece
        self._seen, self._from = self._seen - self._from, 0
        return list(self._find(max(len(self._text) - _LONGEST, 0)))

    def finish(self) -> list[bytes]:
        """Return the remaining items. Raises ValueError if the text ends within the list."""
        found = list(self._find(len(self._text)))
        rest = self._text[self._from :]
        if self._find == self._find_ends:
            last, closed, beyond = rest.rstrip().rpartition(b"]}")
            if not closed or beyond:
                raise ValueError("the list ends within an item")
            found += [last] if last else []
            rest = b"]}"
        self._envelope += rest
        self._text, self._from = b"", 0
        return found

    @property
    def envelope(self) -> bytes:
        return self._envelope

    def _find_items(self, end: int) -> Iterator[bytes]:
        """Search for the beginning of the items."""
        for match in _ITEMS.finditer(self._text, self._seen):
            if match.start() >= end:
                break
            self._advance(match.start() + 1)
            if self._nesting.depth == 1 and not self._nesting.in_string:
                self._advance(match.end())
                self._envelope, self._from = self._text[: match.end()], match.end()
                is_empty = self._text[match.end() : match.end() + 1] == b"]"
                self._find = self._find_nothing if is_empty else self._find_ends
                yield from self._find(end)
                return
        self._advance(end)

    def _find_ends(self, end: int) -> Iterator[bytes]:
        """Search for the ends of items."""
        for match in _BETWEEN.finditer(self._text, self._seen):
            if match.start() >= end:
                break
            after = match.start() + 1
            if after <= self._seen:
                continue
            self._advance(after)
            if self._nesting.depth != 2 or self._nesting.in_string:
                self._misses += 1
                if self._misses % _MISSES == 0:
                    self._seen = skip_deep(self._nesting, self._text, self._seen, end, level=2)
                continue
            item, self._from = self._text[self._from : after], after
            if match[0] != b"}]":
                self._from = self._seen = match.end()
                yield item
            else:
                self._find = self._find_nothing
                yield item
                return
        self._advance(end)

    def _find_nothing(self, end: int) -> Iterator[bytes]:
        """Yield nothing, because the rest belongs to the list itself."""
        return iter(())

    def _advance(self, place: int) -> None:
        for piece in pieces(self._text, self._seen, place):
            if is_cut(piece):
                return
            self._nesting.feed(piece)
            self._seen += len(piece)
