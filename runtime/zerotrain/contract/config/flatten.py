"""The first step of resolving: from nested objects to canonical paths.

It follows aliases and deprecated forms, moves ZeRO keys from the top level to where they belong, and refuses
unknown keys with the nearest known one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError
from .keys import BLOCK_ALIASES, Key, blocks, parent
from .schema import Notice

_MAX_LISTED = 20
"""Largest number of names that an error message lists, since more do not help."""
_OR_REMOVE = "Remove it, or put _ before its name: such keys are comments."
_COMMENT = "Read as a comment: its name begins with _, # or //."
ZERO = "zero_optimization"
OPEN_BLOCKS = ("optimizer.params", "scheduler.params")
"""Objects whose keys depend on a type beside them, which is checked first."""

_LEGACY_OFFLOAD: Mapping[str, tuple[tuple[str, Any, Any], ...]] = {
    # old key -> (new path, value for true, value for false)
    "cpu_offload": ((f"{ZERO}.offload_optimizer.device", "cpu", "none"),),
    "cpu_offload_param": ((f"{ZERO}.offload_param.device", "cpu", "none"),),
    "cpu_offload_use_pin_memory": (
        (f"{ZERO}.offload_optimizer.pin_memory", True, False),
        (f"{ZERO}.offload_param.pin_memory", True, False),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """A value of the file under its canonical path."""

    value: Any
    written: str
    """Path as the user wrote it."""


@dataclass(kw_only=True, slots=True)
class Flat:
    """Values of the file by canonical path."""

    given: dict[str, Given] = field(default_factory=dict)
    notices: list[Notice] = field(default_factory=list)
    unknown_params: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {block: {} for block in OPEN_BLOCKS}
    )
    """Parameters that are not in the table, by object: those of an optimizer that is not either. The resolver
    refuses them for the others."""
    present: set[str] = field(default_factory=set)
    """Objects that the file holds, including empty ones."""

    def add(self, path: str, value: Any, written: str) -> None:
        """Add a value. Raises ConfigError if the same key has two values under two names."""
        before = self.given.get(path)
        if before is not None and before.value != value:
            raise ConfigError(
                written,
                f"is the same key as {before.written}, which is {before.value!r}",
                value,
                f"Keep one of the two, best as {path}.",
            )
        self.given.setdefault(path, Given(value=value, written=written))


class Flattener:
    """Flattener of files by one table of keys."""

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self._keys = {key.path: key for key in keys}
        self._blocks = blocks(keys)
        self._names: dict[str, dict[str, str]] = {block: {} for block in ("", *self._blocks)}
        for path in (*self._keys, *self._blocks):
            name = path.rpartition(".")[2]
            self._names[parent(path)][name] = path
        for key in keys:
            for alias in key.aliases:
                self._names[parent(key.path)][alias] = key.path

    def flatten(self, values: Mapping[str, Any]) -> Flat:
        """Return the file's values.

        Raises ConfigError for unknown keys and for values in place of an object.
        """
        flat = Flat()
        self._walk(values, "", "", flat)
        return flat

    def _walk(self, values: Mapping[str, Any], block: str, written_block: str, flat: Flat) -> None:
        for name, value in values.items():
            written = f"{written_block}.{name}" if written_block else name
            path = self._names[block].get(name)
            if name.startswith(("_", "//", "#")):
                flat.notices.append(Notice(path=written, message=_COMMENT))
            elif block == ZERO and name in _LEGACY_OFFLOAD:
                self._legacy_offload(name, value, written, flat)
            elif path is not None:
                self._enter(path, value, written, flat)
            elif not block:
                self._at_top(name, value, flat)
            elif block in OPEN_BLOCKS:
                flat.unknown_params[block][name] = value
            else:
                raise self.unknown(name, block, written, value)

    def _enter(self, path: str, value: Any, written: str, flat: Flat) -> None:
        if value is None:
            return  # null means the same as an absent key
        if path in self._keys:
            flat.add(path, value, written)
        elif path == ZERO and isinstance(value, bool):
            flat.add(f"{ZERO}.stage", int(value), written)
            flat.notices.append(Notice(path=written, message=f"An old form, read as stage {int(value)}."))
        elif isinstance(value, Mapping):
            flat.present.add(path)
            self._walk(value, path, written, flat)
        else:
            raise ConfigError(
                written, "must be an object", value, f"Its keys are {', '.join(sorted(self._names[path]))}."
            )

    def _at_top(self, name: str, value: Any, flat: Flat) -> None:
        if name in BLOCK_ALIASES:
            self._enter(BLOCK_ALIASES[name], value, name, flat)
            return
        path = self._names.get(ZERO, {}).get(name)
        if path is None and "." in name:
            flat.notices.append(Notice(path=name, message=self._dotted(name)))
            return
        if path is None:
            raise self.unknown(name, "", name, value)
        # Users paste fragments of documentation without the object around them.
        flat.notices.append(Notice(path=name, message=f"Belongs inside {ZERO}; read as {path}."))
        self._enter(path, value, name, flat)

    def _dotted(self, name: str) -> str:
        """Return the notice for a top-level name with dots, which some programs write beside the blocks."""
        block, _, key = name.rpartition(".")
        known = block in self._blocks and key in self._names[block]
        way_out = f"; write {key} within the object {block} instead" if known else ""
        return f"Ignored, as in DeepSpeed: a dot in a name does not reach into an object{way_out}."

    def _legacy_offload(self, name: str, value: Any, written: str, flat: Flat) -> None:
        if value is None:
            return
        if not isinstance(value, bool):
            raise ConfigError(
                written, "must be true or false", value, "Write the offload_... object instead."
            )
        targets = _LEGACY_OFFLOAD[name]
        for path, if_true, if_false in targets:
            flat.add(path, if_true if value else if_false, written)
        paths = " and ".join(path for path, _, _ in targets)
        flat.notices.append(Notice(path=written, message=f"Deprecated; read as {paths}."))

    def unknown(self, name: str, block: str, written: str, value: Any) -> ConfigError:
        """Return the error for a key that is not in the table, with the nearest key that is."""
        here = difflib.get_close_matches(name, self._names[block], n=1, cutoff=0.7)
        if here:
            way_out = f"Did you mean {self._names[block][here[0]]}?"
        else:
            way_out = f"{self._elsewhere(name) or self._listing(block)} {_OR_REMOVE}"
        return ConfigError(written, "is not a known key", value, way_out)

    def _listing(self, block: str) -> str:
        names = sorted(self._names[block])
        if len(names) > _MAX_LISTED:
            return "No known key is near; docs/configuration.md lists them all."
        return f"Known here are {', '.join(names)}."

    def _elsewhere(self, name: str) -> str:
        every = {alias: path for aliases in self._names.values() for alias, path in aliases.items()}
        near = difflib.get_close_matches(name, every, n=1, cutoff=0.7)
        return f"Did you mean {every[near[0]]}?" if near else ""
