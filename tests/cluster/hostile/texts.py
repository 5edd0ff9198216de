"""Dirty text for hostile objects, and the search for its characters in outputs."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import Any

FORGED = "FORGED-LINE"
"""Beginning of a line that only a line break of the tenant can produce."""

ESCAPE = "\x1b]0;pwned\x07\x1b[31m"
"""Escape sequence that sets a terminal's title, rings its bell and turns its text red."""

BIDI = "\u202e\u2066\u200f"
"""Characters that show the following text in another order than it is stored in."""

C1 = "\x9b31m\x85"
"""The eight-bit forms of an escape sequence and of a line break."""

DIRT = f"a{ESCAPE}{BIDI}{C1}\u2028\r\n{FORGED} ok"
"""All of these together, for fields that accept any character."""

BREAKLESS = f"a{ESCAPE}{BIDI}\x9b31mz"
"""The same without characters that count as white space."""

_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_PLAIN = frozenset("\n\t")


def filled(pattern: str, length: int) -> str:
    """Return `pattern` repeated to `length` characters."""
    return (pattern * (length // len(pattern) + 1))[:length]


def raw_characters(text: str) -> list[str]:
    """Return characters of `text` that a terminal, a log or a browser obeys or reorders.

    These are control characters except line feed and tab, C1, bidirectional marks, line separators, and
    halves of surrogate pairs.
    """
    return sorted({f"U+{ord(char):04X}" for char in text if _is_raw(char)})


def _is_raw(char: str) -> bool:
    if char in _PLAIN:
        return False
    return char in _BIDI or unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")


def raw_texts(value: Any, path: str = "") -> Iterator[str]:
    """Yield `path: what is wrong` for every string in a JSON value, keys included, at any depth."""
    stack = [(path, value)]
    while stack:
        place, part = stack.pop()
        if isinstance(part, dict):
            for key, item in part.items():
                yield from _wrong(f"{place}.(key)", key)
                stack.append((f"{place}.{key}", item))
        elif isinstance(part, list):
            stack += [(f"{place}[{index}]", item) for index, item in enumerate(part)]
        elif isinstance(part, str):
            yield from _wrong(place, part)


def _wrong(place: str, text: str) -> Iterator[str]:
    if found := raw_characters(text):
        yield f"{place}: {' '.join(found)} in {text[:200]!r}"
    if any(line.startswith(FORGED) for line in text.split("\n")[1:]):
        yield f"{place}: a forged line in {text[:200]!r}"
