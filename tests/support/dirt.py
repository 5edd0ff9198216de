"""Texts of a malicious tenant: with characters that control a terminal or forge a line."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from hypothesis import strategies as st

RAW = (
    *"\x00\x07\x08\t\n\r\x1b\x7f\x85\x90\u00ad\u061c\u200b\u200d\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d",
    *"\u202e\u2060\u2066\u2067\u2068\u2069\ufeff\ud800\udfff\ue000\U000e0041\U0010ffff",
    *("\x1b[2J", "\x1b[31m", "\x1b]0;pwned\x07", "\x9b31m", "\x9d0;t\x9c"),
    "\nFORGED 2026 [INFO] all is well",
)
"""Texts that are, or contain, something that must not be stored unchanged."""

_CLEAN = st.text(st.characters(categories=("L", "M", "N", "P", "S", "Zs")), max_size=8)


def dirty(*, max_size: int = 12) -> st.SearchStrategy[str]:
    """Return texts of words, forbidden characters and any other characters, in any order."""
    parts = st.one_of(st.sampled_from(RAW), _CLEAN, st.text(max_size=3))
    return st.lists(parts, max_size=max_size).map("".join)


def always_dirty() -> st.SearchStrategy[str]:
    """Return texts that always contain something forbidden, with letters around it."""
    raw = st.lists(st.sampled_from(RAW), min_size=1, max_size=4)
    return raw.map(lambda parts: "a" + "b".join(parts) + "c")


def raw_in(text: str) -> str:
    """Return the characters that must not be stored, for a message; empty if all may be stored."""
    return "".join(
        item for item in text if unicodedata.category(item) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    )


def raw_texts(value: Any) -> list[str]:
    """Return every text within an object that holds forbidden characters, keys included, with its path."""
    return [f"{where}: {text!r}" for where, text in texts_in(value) if raw_in(text)]


def texts_in(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield all texts within lists, mappings and dataclasses, each with its path."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{where} (key)", str(key)
            yield from texts_in(item, f"{where}.{key}")
    elif isinstance(value, list | tuple | set | frozenset):
        for number, item in enumerate(value):
            yield from texts_in(item, f"{where}[{number}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from texts_in(getattr(value, field.name), f"{where}.{field.name}")
