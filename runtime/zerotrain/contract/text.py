"""Sanitising of texts of untrusted programs and objects, so that they are safe to store, log and show.

Termination messages, log lines, keys of configurations, messages of the kubelet, of schedulers and of queues
are written by a tenant or may quote one. Their readers pass them through this module before anything else. It
removes control characters of both sets, line breaks, marks that change the direction of a line, invisible
format characters, lone surrogates, private and unassigned code points, and it bounds the length. So no text
can control a terminal, forge a line of a log, or fill a status.
"""

from __future__ import annotations

import re
import unicodedata

MAX_CHARS = 2000
"""Default length limit of a text; the middle of a longer one is removed."""

MAX_WORD_CHARS = 253
"""Length of a name or a reason: the longest allowed name of an object."""

_GAP = " ... "
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]{0,40}[ -/]{0,4}[@-~]"  # colours, movements of the cursor
    # None holds the beginning of another: each would be searched to its end from every beginning in it.
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\x9d\n]{0,1000}(?:\x07|\x1b\\|\x9c)"  # titles, links
)
"""Sequences that a terminal executes and does not show. An escape without its end is replaced later."""


def one_line(text: str, limit: int = MAX_CHARS) -> str:
    """Return the whole text on one line of at most `limit` characters, without the middle of a longer one."""
    # Cut before the scan: removed characters are at most three quarters of any legitimate text.
    text = cut(text, 4 * limit)
    if not text.isprintable():
        text = " ".join(filter(None, (_clean(line).strip() for line in text.splitlines())))
    return cut(text.strip(), limit)


def word(text: str) -> str:
    """Return a name or a reason on one line."""
    return one_line(text, MAX_WORD_CHARS)


def printable(line: str) -> str:
    """Return one line as a terminal would show it, tabs included.

    A carriage return overwrites the text before it.
    """
    line = line.rstrip("\r\n").rpartition("\r")[2]
    return line if line.isprintable() else "\t".join(map(_clean, line.split("\t")))


def printable_lines(text: str) -> list[str]:
    """Return every line of a longer text, such as the end of a log, as `printable` does."""
    return [printable(line) for line in text.split("\n")]


def is_printable(text: str) -> bool:
    """Return whether no character would be replaced, for a text that is kept or rejected, such as a path."""
    return text.isprintable() or all(_is_kept(character) for character in set(text))


def cut(text: str, limit: int = MAX_CHARS) -> str:
    """Keep both ends of a long text: error messages give the subject first and the cause last."""
    if len(text) <= limit:
        return text
    half = (limit - len(_GAP)) // 2
    return f"{text[:half]}{_GAP}{text[-half:]}" if half > 0 else "..."[:limit]


def _clean(text: str) -> str:
    text = _SEQUENCE.sub("", text)
    return text.translate({ord(item): _substitute(item) for item in set(text) if not _is_kept(item)})


def _is_kept(character: str) -> bool:
    """Return whether a character is a letter, mark, digit, sign or space in this Python's Unicode.

    These are the categories L, M, N, P, S and Zs.
    """
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _substitute(character: str) -> str:
    if character.isspace():
        return " "
    # These are invisible: a replacement would appear within words and emoji.
    return "" if unicodedata.category(character) == "Cf" else "?"
