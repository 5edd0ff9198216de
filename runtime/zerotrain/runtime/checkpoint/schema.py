"""Strict reading of JSON objects: every key known, every type exact, errors with the path of the value."""

from __future__ import annotations

from typing import Any


class SchemaError(ValueError):
    """Error of a value of the manifest that is missing, unknown or of the wrong type."""


class Node:
    """One JSON object and its path; keys are taken one by one and `done()` rejects those that are left."""

    def __init__(self, value: object, path: str) -> None:
        if not isinstance(value, dict):
            raise SchemaError(f"{path} must be an object; got {type(value).__name__}")
        self._left: dict[str, Any] = dict(value)
        self.path = path

    def take(self, name: str) -> Any:
        """Take any JSON value."""
        try:
            return self._left.pop(name)
        except KeyError:
            raise SchemaError(f"{self.path}.{name} is missing") from None

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            raise SchemaError(f"{self.path}.{name} must be a string; got {value!r}")
        return value

    def integer(self, name: str, *, low: int = 0) -> int:
        return integer(self.take(name), f"{self.path}.{name}", low=low)

    def number(self, name: str) -> float:
        value = self.take(name)
        if type(value) not in (int, float):
            raise SchemaError(f"{self.path}.{name} must be a number; got {value!r}")
        try:
            return float(value)
        except OverflowError:
            raise SchemaError(f"{self.path}.{name} is too large for a number") from None

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool):
            raise SchemaError(f"{self.path}.{name} must be true or false; got {value!r}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        return tuple(integer(item, f"{self.path}.{name}") for item in self.items(name))

    def items(self, name: str) -> list[Any]:
        value = self.take(name)
        if not isinstance(value, list):
            raise SchemaError(f"{self.path}.{name} must be a list; got {type(value).__name__}")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """Take a JSON object with free keys."""
        value = self.take(name)
        if not isinstance(value, dict):
            raise SchemaError(f"{self.path}.{name} must be an object; got {type(value).__name__}")
        return value

    def texts(self, name: str) -> dict[str, str]:
        """Take a JSON object whose values are strings."""
        value = self.mapping(name)
        for key, item in value.items():
            if not isinstance(item, str):
                raise SchemaError(f"{self.path}.{name}.{key} must be a string; got {item!r}")
        return value

    def done(self) -> None:
        """Raise SchemaError for keys that were not taken."""
        if self._left:
            raise SchemaError(f"{self.path}.{min(self._left)} is not a known key")


def integer(value: object, path: str, *, low: int = 0) -> int:
    """Return `value` as an int of at least `low`. Raises SchemaError, also for booleans and floats."""
    if type(value) is not int or value < low:
        raise SchemaError(f"{path} must be a whole number of at least {low}; got {value!r}")
    return value
