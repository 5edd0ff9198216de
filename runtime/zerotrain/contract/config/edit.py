"""One change of a configuration as a user would write it into the file; the planner's proposals are such.

The file may have a key under an older name, at another place or in an older form. There must be one value of
it afterwards, so what it goes by now is taken out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .flatten import ZERO, Flattener
from .reader import load
from .table import KEYS


def edited(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` in which the keys of `values`, canonical paths, have these values.

    An empty object as value is put there unless the file has it already. Raises ConfigError for an unknown
    key in `config`, and for a key that stands there twice with two values.
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
