"""The values of all keys during resolving, shared by `resolve.py`, `rules.py` and `build.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import ConfigError
from .flatten import Flat
from .keys import Key
from .schema import Notice, Origin, Unsupported


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """The final value of one key and its origin."""

    value: Any
    origin: Origin
    written: str
    """Path as the user wrote it; the canonical one for defaults."""


@dataclass(kw_only=True, slots=True)
class ConfigDraft:
    """All values and messages that resolving collects."""

    keys: Mapping[str, Key]
    flat: Flat
    world_size: int
    settled: dict[str, Settled] = field(default_factory=dict)
    notices: list[Notice] = field(default_factory=list)
    unsupported: list[Unsupported] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    """Notices of values that have no effect, by path."""

    def value(self, path: str) -> Any:
        """Return the final value of a key, or its default if the key does not apply.

        A parameter of another optimizer or scheduler does not apply.
        """
        settled = self.settled.get(path)
        return self.keys[path].default if settled is None else settled.value

    def given(self, path: str) -> bool:
        """Return whether the file decided the value (by a value or by a computed "auto")."""
        settled = self.settled.get(path)
        return settled is not None and settled.origin in ("file", "auto")

    def written(self, path: str) -> str:
        """Return the path as the user wrote it."""
        settled = self.settled.get(path)
        return path if settled is None else settled.written

    def is_on(self, path: str) -> bool:
        """Return whether a switch has a value that asks for something."""
        return not self.keys[path].asks_for_nothing(self.value(path))

    def derive(self, path: str, value: Any) -> None:
        """Set a value that the file left open."""
        self.settled[path] = Settled(value=value, origin="derived", written=path)

    def drop(self, path: str, message: str) -> None:
        """Replace a value of the file that has no effect by the default, with a notice."""
        self.notice(path, message)
        self.settled[path] = replace(self.settled[path], value=self.keys[path].default, origin="derived")
        self.dropped[path] = message

    def notice(self, path: str, message: str) -> None:
        """Record that a key has another effect here."""
        self.notices.append(Notice(path=self.written(path), message=message))

    def refuse_to_run(self, path: str, reason: str, way_out: str) -> None:
        """Record that a configuration can be loaded and shown but not started with this key."""
        lifted_by = self.keys[path].lifted_by
        self.unsupported.append(
            Unsupported(path=self.written(path), reason=reason, way_out=way_out, lifted_by=lifted_by)
        )

    def error(self, path: str, rule: str, way_out: str) -> ConfigError:
        """Return a ConfigError about the value of a key."""
        return ConfigError(self.written(path), rule, self.value(path), way_out)
