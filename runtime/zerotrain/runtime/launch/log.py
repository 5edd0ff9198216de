"""The launcher's own lines in the container's log."""

from __future__ import annotations

import sys
from contextlib import suppress


def say(text: str) -> None:
    """Write `launcher: text`; a log without a reader must not end the launcher."""
    with suppress(OSError):
        print(f"launcher: {text}", file=sys.stderr, flush=True)
