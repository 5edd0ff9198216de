"""Times as Kubernetes writes them: RFC 3339 in UTC. For all that reads pods or workers' records."""

from __future__ import annotations

from datetime import UTC, datetime


def parse_time(text: str | None) -> datetime | None:
    """Read `2026-01-31T12:00:00Z` (fractions allowed); None stays None. Raises ValueError on other text."""
    if not text:
        return None
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def from_unix(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
