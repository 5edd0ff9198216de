"""Text of other people's programs and objects, made safe to store, to log and to show.

Termination messages, log lines, keys of configurations, messages of the kubelet, of schedulers and of queues
are written by a tenant or may quote one. What reads them passes them through this module before it does
anything else with them. Control characters of both sets, line breaks, marks that turn the direction of a
line, invisible format characters, lone surrogates, private and unassigned code points do not get past it, and
no text is longer than its reader allows: none can drive a terminal, forge a line of a log, or fill a status.
"""

from __future__ import annotations

import re
import unicodedata

MAX_CHARS = 2000
"""Of a text that is given no limit of its own; a longer one loses its middle."""

MAX_WORD_CHARS = 253
"""Of a name or a reason: as long as the name of an object may be."""

_GAP = " ... "
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]{0,40}[ -/]{0,4}[@-~]"  # colours, movements of the cursor
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]{0,1000}(?:\x07|\x1b\\|\x9c)"  # titles, links
)
"""What a terminal obeys and does not show. An escape without its end is left to be replaced."""


def one_line(text: str, limit: int = MAX_CHARS) -> str:
    """The whole text on one line of at most `limit` characters; a longer one loses its middle."""
    # Before anything walks it: what makes no character below is more than three quarters of no honest text.
    text = cut(text, 4 * limit)
    if not text.isprintable():
        text = " ".join(filter(None, (_clean(line).strip() for line in text.splitlines())))
    return cut(text.strip(), limit)


def word(text: str) -> str:
    """A name or a reason."""
    return one_line(text, MAX_WORD_CHARS)


def printable(line: str) -> str:
    """One line as a terminal would show it, tabs included: a carriage return overwrites what was before."""
    line = line.rstrip("\r\n").rpartition("\r")[2]
    return line if line.isprintable() else "\t".join(map(_clean, line.split("\t")))


def printable_lines(text: str) -> list[str]:
    """The same of every line of a longer text, such as the end of a log."""
    return [printable(line) for line in text.split("\n")]


def is_printable(text: str) -> bool:
    """Whether nothing of the text would be replaced: for what must stay as it is or be refused, as a path."""
    return text.isprintable() or all(_is_kept(character) for character in set(text))


def cut(text: str, limit: int = MAX_CHARS) -> str:
    """Keep both ends of a long text: errors say what at the start and why at the end."""
    if len(text) <= limit:
        return text
    half = (limit - len(_GAP)) // 2
    return f"{text[:half]}{_GAP}{text[-half:]}" if half > 0 else "..."[:limit]


def _clean(text: str) -> str:
    text = _SEQUENCE.sub("", text)
    return text.translate({ord(item): _substitute(item) for item in set(text) if not _is_kept(item)})


def _is_kept(character: str) -> bool:
    """Letters, marks, digits, signs and spaces (categories L, M, N, P, S and Zs) of this Python's Unicode."""
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _substitute(character: str) -> str:
    if character.isspace():
        return " "
    # Those draw nothing: a sign in their place would stand within words and emoji.
    return "" if unicodedata.category(character) == "Cf" else "?"
