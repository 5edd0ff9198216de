"""The table of every configuration key: name, type, default, and what this version does with it.

One row per key; reading, resolving, reporting and `docs/configuration.md` all follow the rows. To make a key
work, implement it and set its row (or its choice) to `Status.IMPLEMENTED`: nothing else changes here.
The rows stand in the package `table`, in the order of the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """What this version does with a key, or with one value of it."""

    IMPLEMENTED = "implemented"  # does what it says
    ACCEPTED = "accepted"  # runs, a notice says what happens instead
    NOT_RUN = "not run"  # loads and shows; engine and operator refuse to start
    REFUSED = "refused"  # an error already while loading


class Kind(StrEnum):
    """JSON type of a value."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    TEXT = "text"
    FLOATS = "list of float"
    INTS = "list of int"
    TEXTS = "list of text"
    FLOAT_OR_FLOATS = "float or list"
    OBJECT = "object"  # anything inside; its keys are not checked


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One allowed value of a text or int key."""

    value: Any
    """As in the documentation; texts match in any case."""

    means: Any = None
    """The value it stands for, when that is another one."""

    status: Status | None = None
    """None = the key's."""

    note: str = ""
    """ACCEPTED: what happens instead. NOT_RUN and REFUSED: why. IMPLEMENTED: what it does."""

    way_out: str = ""
    """What to write instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of the file."""

    path: str
    """Canonical dotted path."""

    kind: Kind
    """Type of the value; null is also allowed when the default is None."""

    default: Any
    """Value when the file does not say."""

    effect: str
    """What the key does when it runs, one or two sentences."""

    status: Status = Status.IMPLEMENTED
    """What this version does with values that are not in `off`."""

    note: str = ""
    """ACCEPTED: what happens instead. NOT_RUN and REFUSED: why."""

    way_out: str = ""
    """NOT_RUN and REFUSED: what to write instead."""

    postponed: str = ""
    """NOT_RUN: the feature, where leaving it out is a decision (`docs/postponed.md` lists these)."""

    lifted_by: str = ""
    """NOT_RUN: the argument of `initialize` that supplies what is missing."""

    off: tuple[Any, ...] = ()
    """Values beside the default that ask for nothing, so they need no notice."""

    aliases: tuple[str, ...] = ()
    """Other names of the key in the same object."""

    choices: tuple[Choice, ...] = ()
    """Allowed values; empty = any of the kind within the range."""

    minimum: float | None = None
    """Smallest allowed number."""

    maximum: float | None = None
    """Largest allowed number."""

    exact: bool = False
    """A fraction is an error instead of rounded down with a notice."""

    needs: str = ""
    """Path of the switch without which the key has no effect."""

    only: tuple[str, ...] = ()
    """Parameters of an optimizer or scheduler: the types that have it."""

    default_by_type: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of an optimizer or scheduler: types whose default differs."""

    auto: str = ""
    """Name of the rule for "auto" (see `auto.py`); "" = the default."""

    fill: bool = False
    """An absent key counts as "auto" when the caller knows the value."""

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether the value equals the default or another neutral one."""
        return any(value == neutral and type(value) is type(neutral) for neutral in (self.default, *self.off))

    def choice(self, value: Any) -> Choice | None:
        """The row of an allowed value, or None."""
        wanted = _fold(value)
        return next((choice for choice in self.choices if _fold(choice.value) == wanted), None)


def _fold(value: Any) -> Any:
    return value.casefold() if isinstance(value, str) else value


ENDLESS = frozenset({"steps_per_print"})
"""Keys that may be Infinity, which means never; Accelerate writes it."""


BLOCK_ALIASES: Mapping[str, str] = {"bfloat16": "bf16"}
"""Older names of whole objects at the top level."""


def parent(path: str) -> str:
    """The object that holds a key: "" for a top-level one."""
    return path.rpartition(".")[0]


def blocks(keys: tuple[Key, ...]) -> frozenset[str]:
    """The paths of all objects whose keys are rows of the table."""
    found = set()
    for key in keys:
        path = parent(key.path)
        while path:
            found.add(path)
            path = parent(path)
    return frozenset(found)
