"""Change of a configuration, as a user would write it into the file.

The planner's proposals are such changes. The file may have a key under an older name, in another object or in
an older form. Only one value of the key may remain, so the present form is removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .flatten import ZERO, Flattener
from .reader import load
from .table import KEYS


def edited(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `config` in which the keys of `values`, given as canonical paths, have these values.

    A value that is an empty object is inserted only if the file does not have the object yet. Raises
    ConfigError for an unknown key in `config`, and for a key that occurs twice with two values.
    """
    changed = dict(load(config).values)  # a deep copy
    given = Flattener(KEYS).flatten(changed).given
    if isinstance(changed.get(ZERO), bool):  # the old form of a stage
        changed[ZERO] = {"stage": int(changed[ZERO])}
    for path, value in values.items():
        if path in given:
            _remove(changed, given[path].written)
        _put(changed, path, value)
    return changed


def _remove(config: dict[str, Any], written: str) -> None:
    *blocks, name = written.split(".")
    inner: Any = config
    for block in blocks:
        inner = inner.get(block, {})
    if not isinstance(inner.get(name), dict):
        inner.pop(name, None)


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    *blocks, name = path.split(".")
    inner = config
    for block in blocks:
        if not isinstance(inner.get(block), dict):
            inner[block] = {}
        inner = inner[block]
    if value != {} or not isinstance(inner.get(name), dict):
        inner[name] = value
