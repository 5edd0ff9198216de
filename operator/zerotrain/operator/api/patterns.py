"""Regular expressions whose matching time is bounded by their size times the length of the text, whoever
wrote either.

`failurePolicy.rules` hold patterns of one tenant and are matched inside an operator that serves all tenants,
against texts that training programs wrote. Python's `re` backtracks and takes exponential time on such pairs;
RE2 does not, and the API server's CEL uses it too. Patterns are compiled when a job is read, and matched by
the failure policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import re2

MAX_PATTERN_LENGTH = 256
MAX_MEMORY_BYTES = 256 << 10
"""Maximum memory in bytes of one compiled pattern and its matching; RE2 rejects a pattern whose program does
not fit a part of it."""


class PatternError(ValueError):
    """Error for a pattern that cannot be used; the message is RE2's."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern."""

    expression: Any

    @property
    def num_instructions(self) -> int:
        """Size of the program; a search takes at most that many steps per byte."""
        return int(self.expression.programsize)

    def found_in(self, text: str) -> bool:
        """Return whether some part of `text` matches."""
        # Lone surrogates have no bytes; in the output of programs they stand for what was no text anyway.
        return self.expression.search(text.encode(errors="replace")) is not None


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> Pattern:
    """Compile a pattern. Raises PatternError."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise PatternError(f"a pattern has at most {MAX_PATTERN_LENGTH} characters; got {len(pattern)}")
    options = re2.Options()
    options.max_mem = MAX_MEMORY_BYTES
    options.log_errors = False
    try:
        return Pattern(re2.compile(pattern.encode(errors="replace"), options))
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if error.args else "refused"
        raise PatternError(f"{pattern!r} is not a regular expression in RE2's syntax: {reason}") from None
