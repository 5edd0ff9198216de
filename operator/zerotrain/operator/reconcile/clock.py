"""Times in Kubernetes' format, RFC 3339 in UTC, for all modules that read pods or workers' records."""

from __future__ import annotations

import math
from datetime import UTC, datetime


def parse_time(text: str | None) -> datetime | None:
    """Return the time in a text such as `2026-01-31T12:00:00Z` (fractions allowed); None for no text.

    Raises ValueError on other text.
    """
    if not text:
        return None
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def from_unix(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def moment(unix_s: float) -> datetime | None:
    """Return the time of a number that a tenant's program reported; None for a number outside the
    calendar."""
    if not 0 < unix_s < math.inf:
        return None
    try:
        return from_unix(unix_s)
    except (ValueError, OverflowError, OSError):
        return None
