"""Objects of JSON as the fields of a dataclass, for files that one of our processes writes for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any


def checked_fields(
    cls: type, data: Any, path: str, *, file: str, error: Callable[[str], ValueError]
) -> dict[str, Any]:
    """Return the values of an object of this dataclass, by field; a field that is absent keeps its default.

    `path` precedes the names in messages (`model.`), `file` stands for the whole document. Raises `error` for
    what is no object, and for the first unknown or missing key.
    """
    if not isinstance(data, dict):
        raise error(f"{path.rstrip('.') or file} must be an object; got {type(data).__name__}")
    known = {item.name: item for item in fields(cls)}
    if unknown := sorted(set(data) - set(known)):
        raise error(f"{path}{unknown[0]} is not a key here; known are {', '.join(sorted(known))}")
    needed = (
        name for name, item in known.items() if item.default is MISSING and item.default_factory is MISSING
    )
    if missing := sorted(set(needed) - set(data)):
        raise error(f"{path}{missing[0]} is missing; it has no default")
    return dict(data)
