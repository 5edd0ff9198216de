"""Regular expressions whose time is bounded by their size times the text's, whoever wrote either.

`failurePolicy.rules` hold patterns of one tenant and are matched inside an operator that serves all, against
texts that training programs wrote. Python's `re` backtracks and takes exponential time on both; RE2 does not,
and the API server's CEL uses it too. Compiled when a job is read, matched by the failure policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import re2

MAX_PATTERN_LENGTH = 256
MAX_MEMORY_BYTES = 256 << 10
"""Of one compiled pattern and its matching; RE2 refuses a pattern whose program does not fit a part of it."""


class PatternError(ValueError):
    """The pattern cannot be used; the message is RE2's."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern."""

    expression: Any

    @property
    def num_instructions(self) -> int:
        """Size of the program; a search takes so many steps per byte at most."""
        return int(self.expression.programsize)

    def found_in(self, text: str) -> bool:
        """Whether some part of `text` matches."""
        # Lone surrogates have no bytes; in what programs write they stand for what was no text anyway.
        return self.expression.search(text.encode(errors="replace")) is not None


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> Pattern:
    """Raises PatternError."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise PatternError(f"a pattern has at most {MAX_PATTERN_LENGTH} characters; got {len(pattern)}")
    options = re2.Options()
    options.max_mem = MAX_MEMORY_BYTES
    options.log_errors = False
    try:
        return Pattern(re2.compile(pattern.encode(errors="replace"), options))
    except re2.error as error:
        said = error.args[0].decode(errors="replace") if error.args else "refused"
        raise PatternError(f"{pattern!r} is no regular expression of RE2's syntax: {said}") from None
