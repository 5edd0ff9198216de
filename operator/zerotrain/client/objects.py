"""Parsing of the API server's objects within bounds: a stored job that is too large or too deep is returned
without its spec and with a note that says so."""

from __future__ import annotations

from typing import Any

from zerotrain.contract.json_text import read_json
from zerotrain.operator.constants import MAX_SPEC_BYTES


def read_item(text: bytes) -> dict[str, Any]:
    """Parse one of many objects. Raises ValueError."""
    if len(text) <= MAX_SPEC_BYTES:
        try:
            return _whole(text)
        except ValueError:
            pass
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
        try:
            return read_json(line)
        except ValueError:
            pass
    from zerotrain.operator.api.job_text import read_event

    return read_event(line)


def _whole(text: bytes) -> dict[str, Any]:
    found = read_json(text)
    if not isinstance(found, dict):
        raise ValueError("JSON that is no object")
    return found
