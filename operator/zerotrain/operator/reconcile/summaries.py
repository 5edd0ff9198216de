"""Small phrases of conditions and events."""

from __future__ import annotations

from collections.abc import Sequence


def summarize(names: Sequence[str], most: int = 3) -> str:
    """Return `a, b, c and 4 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
