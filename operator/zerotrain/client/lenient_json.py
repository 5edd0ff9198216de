"""Tolerant reading of the API server's objects: parsing within bounds, and fields that may be absent.

A stored job that is too large or too deep is returned without its spec and with a note that says so. A field
that is absent or of another type reads as empty: a client must show whatever a user put into a pod. A job's
status is read by the API's own models (`operator.api.lenient`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from zerotrain.contract.json_text import read_json
from zerotrain.operator.constants import MAX_SPEC_BYTES

MAX_WHOLE = 2**63


class Fields:
    """One JSON object."""

    def __init__(self, value: object) -> None:
        self._value: Mapping[str, Any] = value if isinstance(value, Mapping) else {}

    def __bool__(self) -> bool:
        return bool(self._value)

    def text(self, name: str) -> str:
        value = self._value.get(name)
        return value if isinstance(value, str) else ""

    def whole(self, name: str) -> int | None:
        value = self._value.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not -MAX_WHOLE <= value < MAX_WHOLE:
            return None
        return value

    def count(self, name: str) -> int:
        """Return the whole number; 0 where it is absent."""
        return self.whole(name) or 0

    def flag(self, name: str) -> bool:
        return self._value.get(name) is True

    def moment(self, name: str) -> datetime | None:
        """Return the time in RFC 3339, as the API server writes it; None where it is absent."""
        try:
            moment = datetime.fromisoformat(self.text(name))
        except ValueError:
            return None
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)

    def part(self, name: str) -> Fields:
        return Fields(self._value.get(name))

    def parts(self, name: str) -> tuple[Fields, ...]:
        value = self._value.get(name)
        return tuple(Fields(item) for item in value) if isinstance(value, list) else ()

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._value.get(name)
        return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()

    def pairs(self, name: str) -> dict[str, str]:
        """Return an object with text values, such as labels."""
        value = self._value.get(name)
        pairs = value.items() if isinstance(value, Mapping) else ()
        return {key: text for key, text in pairs if isinstance(text, str)}

    def names(self) -> tuple[str, ...]:
        """Return the names of all fields that are present."""
        return tuple(name for name in self._value if isinstance(name, str))


def read_item(text: bytes) -> dict[str, Any]:
    """Parse one of many objects. Raises ValueError."""
    if len(text) <= MAX_SPEC_BYTES:
        with suppress(ValueError):
            return _whole(text)
    from zerotrain.operator.api.job_text import read_job  # the models take a while to import

    return read_job(text)


def read_object(text: bytes) -> dict[str, Any]:
    """Parse an object that was requested by its name, in full if possible. Raises ValueError."""
    try:
        return _whole(text)
    except ValueError:
        return read_item(text)


def read_line(line: bytes) -> Any:
    """Parse an event of a watch. Raises ValueError."""
    if len(line) <= MAX_SPEC_BYTES:
        with suppress(ValueError):
            return read_json(line)
    from zerotrain.operator.api.job_text import read_event

    return read_event(line)


def _whole(text: bytes) -> dict[str, Any]:
    found = read_json(text)
    if not isinstance(found, dict):
        raise ValueError("JSON that is no object")
    return found
