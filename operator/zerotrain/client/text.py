"""Texts from a cluster, made harmless: a training program's log must not drive the terminal that shows it."""

from __future__ import annotations

import re

_UNPRINTABLE = re.compile(r"[^\t\x20-\x7e\u00a0-\U0010ffff]|[\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters of both sets, separators, marks that turn a line's direction, lone surrogates."""

_COLOURS = re.compile(r"\x1b\[[0-9;]{0,40}m")


def printable(text: str) -> str:
    """One line without anything that a terminal obeys: without colours, and without what a carriage return
    overwrote."""
    line = text.rstrip("\r\n").rpartition("\r")[2]
    return _UNPRINTABLE.sub("?", _COLOURS.sub("", line))


def printable_lines(text: str) -> list[str]:
    """The same for a text of several lines."""
    return [printable(line) for line in text.split("\n")]


def shortened(text: str, limit: int) -> str:
    """On one line, at most `limit` characters."""
    line = " ".join(printable_lines(text)).strip()
    return line if len(line) <= limit else line[: max(limit - 3, 0)] + "..."
