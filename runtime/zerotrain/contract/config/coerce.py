"""The second step of resolving: conversion of one value of the file to its key's type, range and spelling."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

from .errors import ConfigError
from .keys import ENDLESS, Key, KeyKind

_TRUTH = {"true": True, "false": False, 0: False, 1: True}
_INT_LIMIT = 2**63  # the largest value of an engine counter or a tensor size


class Coercer:
    """Converter of the values of one key, which collects the notices about the conversion.

    Every method raises ConfigError when the value does not fit.
    """

    def __init__(self, key: Key, written: str) -> None:
        self._key = key
        self._written = written
        self.remarks: list[str] = []

    def coerce(self, value: Any) -> Any:
        """Return the value in its final type. Numbers are within the key's range."""
        by_kind: Mapping[KeyKind, Callable[[Any], Any]] = {
            KeyKind.BOOL: self._bool,
            KeyKind.INT: self._int,
            KeyKind.FLOAT: self._float,
            KeyKind.TEXT: self._text,
            KeyKind.FLOATS: lambda items: self._list(items, self._float),
            KeyKind.INTS: lambda items: self._list(items, self._int),
            KeyKind.TEXTS: lambda items: self._list(items, self._text),
            KeyKind.FLOAT_OR_FLOATS: lambda item: (
                self._list(item, self._float) if isinstance(item, list) else self._float(item)
            ),
            KeyKind.OBJECT: self._object,
        }
        return by_kind[self._key.kind](value)

    def _error(self, rule: str, value: Any, way_out: str) -> ConfigError:
        return ConfigError(self._written, rule, value, way_out)

    def _bool(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        lowered = value.casefold() if isinstance(value, str) else value
        if isinstance(lowered, str | int) and lowered in _TRUTH:
            self.remarks.append(f"{value!r} is read as {str(_TRUTH[lowered]).lower()}.")
            return _TRUTH[lowered]
        raise self._error("must be true or false", value, "Write true or false without quotes.")

    def _int(self, value: Any) -> int:
        if self._key.path in ENDLESS and value == math.inf:
            return 0
        if isinstance(value, int) and not isinstance(value, bool):
            whole = value
        else:
            number = self._number(value)
            whole = math.floor(number)
            if whole != number and self._key.exact:
                raise self._error("must be a whole number", value, f"Write {whole} or {whole + 1}.")
            if whole != number:
                self.remarks.append(f"{value!r} is rounded down to {whole}.")
        if abs(whole) >= _INT_LIMIT:
            raise self._error("must be below 2 ** 63", value, "Write a smaller number.")
        self._check_range(whole, value)
        return whole

    def _float(self, value: Any) -> float:
        number = self._number(value)
        self._check_range(number, value)
        return number

    def _number(self, value: Any) -> float:
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                raise self._error("must be a number", value, self._number_hint()) from None
            self.remarks.append(f"The text {value!r} is read as a number.")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error("must be a number", value, self._number_hint())
        else:
            number = _as_float(value)
        if not math.isfinite(number):
            raise self._error("must be a finite number", value, self._number_hint())
        return number

    def _number_hint(self) -> str:
        shown = self._key.default if isinstance(self._key.default, int | float) else 1
        return f"Write a number such as {shown}{', or auto in quotes' if self._key.auto else ''}."

    def _check_range(self, number: float, value: Any) -> None:
        low, high = self._key.minimum, self._key.maximum
        if low is not None and number < low:
            raise self._error(f"must be at least {low:g}", value, f"Write {low:g} or more.")
        if high is not None and number > high:
            raise self._error(f"must be at most {high:g}", value, f"Write {high:g} or less.")

    def _text(self, value: Any) -> str:
        if not isinstance(value, str):
            raise self._error("must be a text", value, "Write it in double quotes.")
        return value

    def _list(self, value: Any, item: Callable[[Any], Any]) -> list[Any]:
        if not isinstance(value, list):
            raise self._error("must be a list", value, "Write it between [ and ].")
        return [item(each) for each in value]

    def _object(self, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self._error("must be an object", value, "Write it between { and }.")
        return value


def choose(key: Key, value: Any, written: str, *, otherwise: str | None = None) -> Any:
    """Return the canonical spelling of an allowed value.

    Raises ConfigError that names the allowed values and the nearest one, or else says to do `otherwise`.
    """
    choice = key.choice(value)
    if choice is not None:
        return choice.value if choice.means is None else choice.means
    allowed = [str(choice.value) for choice in key.choices]
    by_folded = {name.casefold(): name for name in allowed}
    near = difflib.get_close_matches(str(value).casefold(), by_folded, n=1)
    way_out = f"Did you mean {by_folded[near[0]]}?" if near else otherwise or "Take one of these."
    raise ConfigError(written, f"must be one of {', '.join(allowed)}", value, way_out)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
