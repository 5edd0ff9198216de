"""JSON texts read within bounds, or taken apart by their outermost levels without parsing what lies below.

Free-form JSON of strangers may be megabytes of empty lists (fifty times as much in Python) or nested deeper
than any parser goes. Here its text is looked at with searches of whole pieces alone, in memory and time that
grow with its length and with nothing else. The texts are valid JSON on one line, as an API server writes it;
of any other text the parts that are found are no JSON, and their reader says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from zerotrain.contract.json_depth import Nesting, is_cut, pieces
from zerotrain.contract.strict_json import strict_json

MAX_DEPTH = 512
"""Lists and objects within each other that are read. Typed objects have a tenth of that."""


def read_json(text: bytes) -> Any:
    """The value of a text of any length that the API server sent. Raises JsonError where it is no JSON or too
    deep for those who read it."""
    return strict_json(text, max_bytes=len(text), max_depth=MAX_DEPTH, finite=False)


def members(text: bytes, names: Sequence[str]) -> dict[str, bytes]:
    """The texts of an object's values by name, in their order. `names` are all that it may have: the value
    before any other one would not end where it does."""
    either = "|".join(re.escape(name) for name in names).encode()
    nesting, at, found = Nesting(), 0, list[tuple[str, int, int]]()
    for match in re.finditer(rb'[{,] ?"(' + either + rb')":', text):
        for piece in pieces(text, at, match.start() + 1):
            nesting.feed(piece)
        at = match.start() + 1
        if nesting.depth == 1 and not nesting.in_string:
            found.append((match[1].decode(), match.start(), match.end()))
    ends = [start for _, start, _ in found] + [len(text.rstrip()) - 1]
    return {name: text[begin:end] for (name, _, begin), end in zip(found, ends[1:], strict=True)}


_FIRST = rb' ?"(?:apiVersion|kind|metadata)":'
_BETWEEN = re.compile(rb"\}(?:, ?(?=\{" + _FIRST + rb")|\](?=," + _FIRST + rb"))")
"""What may stand behind an item: the next one, or the rest of a list that ends with its metadata."""
_LONGEST = 32
"""Characters of such a place, or of the beginning of the items."""
_ITEMS = re.compile(rb'[{,] ?"items": ?\[')


class ItemSplitter:
    """The items of a Kubernetes list, as texts, while the list still comes. No more than one of them is held.

    `feed` the list piece by piece and `finish` it; `envelope` is then the list without its items.
    """

    def __init__(self) -> None:
        self._text = b""
        self._from = 0
        """What lies before was given out."""
        self._nesting, self._seen = Nesting(), 0
        """Of the text up to this place."""
        self._find = self._find_items
        self._envelope = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The items that are whole by now."""
        self._text = self._text[self._from :] + piece
        self._seen, self._from = self._seen - self._from, 0
        return list(self._find(max(len(self._text) - _LONGEST, 0)))

    def finish(self) -> list[bytes]:
        """The items that are left. Raises ValueError where the text ends within the list."""
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
        """Where the items begin."""
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
        """Where items end."""
        for match in _BETWEEN.finditer(self._text, self._seen):
            if match.start() >= end:
                break
            after = match.start() + 1
            self._advance(after)
            if self._nesting.depth != 2 or self._nesting.in_string:
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
        """The rest is the list's own."""
        return iter(())

    def _advance(self, place: int) -> None:
        for piece in pieces(self._text, self._seen, place):
            if is_cut(piece):
                return
            self._nesting.feed(piece)
            self._seen += len(piece)
