"""The table of every configuration key: name, type, default, and what this version does with it.

There is one row per key; reading, resolving, reporting and `docs/configuration.md` all follow the rows. To
make a key work, implement it and set its row (or its choice) to `Status.IMPLEMENTED`: nothing else changes
here. The rows are in the package `table`, in the order of the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """Treatment of a key, or of one value of it, by this version."""

    IMPLEMENTED = "implemented"  # does what it says
    ACCEPTED = "accepted"  # runs; a notice says what happens instead
    NOT_RUN = "not run"  # can be loaded and shown; engine and operator refuse to start
    REFUSED = "refused"  # an error already during loading


class KeyKind(StrEnum):
    """JSON type of a value."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    TEXT = "text"
    FLOATS = "list of float"
    INTS = "list of int"
    TEXTS = "list of text"
    FLOAT_OR_FLOATS = "float or list"
    OBJECT = "object"  # any content; its keys are not checked


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One allowed value of a text or int key."""

    value: Any
    """Value as in the documentation; texts match in any case."""

    means: Any = None
    """Value that it stands for, if that is another one."""

    status: Status | None = None
    """Status of this value; None means that of the key."""

    note: str = ""
    """Explanation. ACCEPTED: what happens instead. NOT_RUN and REFUSED: why. IMPLEMENTED: what it does."""

    way_out: str = ""
    """Text about what to write instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of the file."""

    path: str
    """Canonical dotted path."""

    kind: KeyKind
    """Type of the value; null is also allowed if the default is None."""

    default: Any
    """Value if the file does not have the key."""

    effect: str
    """Effect of the key when it runs, in one or two sentences."""

    status: Status = Status.IMPLEMENTED
    """Treatment of values that are not in `off`."""

    note: str = ""
    """Explanation. ACCEPTED: what happens instead. NOT_RUN and REFUSED: why."""

    way_out: str = ""
    """Remedy for NOT_RUN and REFUSED: what to write instead."""

    postponed: str = ""
    """Feature of a NOT_RUN key that is left out by decision (`docs/postponed.md` lists these)."""

    lifted_by: str = ""
    """Argument of `initialize` that supplies what a NOT_RUN key lacks."""

    off: tuple[Any, ...] = ()
    """Values beside the default that request nothing, so they need no notice."""

    aliases: tuple[str, ...] = ()
    """Aliases of the key in the same object."""

    choices: tuple[Choice, ...] = ()
    """Allowed values; empty means any value of the kind within the range."""

    minimum: float | None = None
    """Smallest allowed number."""

    maximum: float | None = None
    """Largest allowed number."""

    exact: bool = False
    """Whether a fraction is an error, instead of rounded down with a notice."""

    needs: str = ""
    """Path of the switch without which the key has no effect."""

    only: tuple[str, ...] = ()
    """Types that have this parameter of an optimizer or scheduler."""

    default_by_type: Mapping[str, Any] = field(default_factory=dict)
    """Types of an optimizer or scheduler whose default for this parameter differs."""

    auto: str = ""
    """Name of the rule for "auto" (see `auto.py`); "" means the default."""

    fill: bool = False
    """Whether an absent key counts as "auto" if the caller knows the value."""

    is_secret: bool = False
    """Whether a value is never shown."""

    def asks_for_nothing(self, value: Any) -> bool:
        """Return whether the value equals the default or another neutral one, or is an object that is off."""
        if self.kind is KeyKind.OBJECT and isinstance(value, Mapping) and value.get("enabled") is False:
            return True  # whatever else is in it
        return any(value == neutral and type(value) is type(neutral) for neutral in (self.default, *self.off))

    def choice(self, value: Any) -> Choice | None:
        """Return the row of an allowed value, or None."""
        wanted = _fold(value)
        return next((choice for choice in self.choices if _fold(choice.value) == wanted), None)


def _fold(value: Any) -> Any:
    return value.casefold() if isinstance(value, str) else value


ENDLESS = frozenset({"steps_per_print"})
"""Keys that may be Infinity, which means never; Accelerate writes it."""


BLOCK_ALIASES: Mapping[str, str] = {"bfloat16": "bf16"}
"""Older names of whole objects at the top level."""


def parent(path: str) -> str:
    """Return the path of the object that holds a key; "" for a top-level key."""
    return path.rpartition(".")[0]


def blocks(keys: tuple[Key, ...]) -> frozenset[str]:
    """Return the paths of all objects whose keys are rows of the table."""
    found = set()
    for key in keys:
        path = parent(key.path)
        while path:
            found.add(path)
            path = parent(path)
    return frozenset(found)
