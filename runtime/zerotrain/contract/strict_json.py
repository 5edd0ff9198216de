"""Reader of JSON from untrusted files and peers, bounded in size and depth, with one kind of error.

`json.loads` alone answers hostile input with RecursionError, which no `except ValueError` catches, and
accepts `NaN`, `Infinity` and `1e999` as numbers. Every record of the product is read here, and the shape of
the tree (`tests/test_repo_shape.py`) allows no `json.loads` elsewhere. The tolerant reader of configurations
(`contract.config`) uses this module, too, after it has made strict JSON of the user's text.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from zerotrain.contract.json_depth import depth_of
from zerotrain.contract.regular_file import read_regular

MAX_BYTES = 4 << 20
"""Largest record in bytes, unless its reader sets another limit."""

MAX_DEPTH = 64
"""Deepest nesting of lists and objects; the product's own records use eight."""

MAX_MODEL_CONFIG_BYTES = 4 << 20
"""Largest `config.json` of a model folder in bytes; the largest in use have a few hundred KiB."""

_SHOWN_DIGITS = 40


class JsonError(ValueError):
    """The text is not JSON that is accepted here; the message gives the reason."""

    def __init__(self, message: str, *, reason: str = "", offset: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason or message
        """Message without the position."""
        self.offset = offset
        """Character at which the text stops being JSON; None without a position, as for the size."""


def strict_json(
    text: str | bytes | bytearray,
    *,
    max_bytes: int = MAX_BYTES,
    max_depth: int = MAX_DEPTH,
    finite: bool = True,
    unique_keys: bool = False,
) -> Any:
    """Return the value of a JSON text.

    Args:
        text: UTF-8 if it is bytes; a byte order mark at its beginning is skipped.
        max_bytes: longest text; a longer one is refused before it is read.
        max_depth: deepest nesting of lists and objects; a scalar has depth 0.
        finite: whether `NaN`, `Infinity` and numbers that no float can hold are refused, as JSON's grammar
            and its other readers do. Python's writer emits them, so foreign files may need False.
        unique_keys: whether a repeated key of an object is refused; otherwise its last value counts.

    Raises:
        JsonError: for any violation of these rules.
    """
    if len(text) > max_bytes:
        raise JsonError(f"has {len(text)} bytes; at most {max_bytes} are read")
    try:
        data = text if isinstance(text, str) else bytes(text).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JsonError(f"is no UTF-8 ({error.reason} at byte {error.start})") from error
    _check_depth(data, max_depth)
    try:
        return _decoder(finite, unique_keys).decode(data)
    except JsonError:
        raise
    except json.JSONDecodeError as error:
        raise JsonError(
            f"is not JSON ({error.msg} at line {error.lineno}, column {error.colno})",
            reason=error.msg,
            offset=error.pos,
        ) from error
    except RecursionError:  # a limit lower than Python's own, or a deep stack of the caller
        raise JsonError("is nested too deeply") from None
    except ValueError as error:  # a whole number of more digits than Python reads
        raise JsonError(f"holds a number that cannot be read ({error})") from error


def read_json(
    path: Path, *, max_bytes: int = MAX_BYTES, follow_link: bool = False, finite: bool = True
) -> Any:
    """Return the value in a regular file. Raises JsonError; OSError as `read_regular`."""
    return strict_json(
        read_regular(path, max_bytes, follow_link=follow_link), max_bytes=max_bytes, finite=finite
    )


def own_json(text: str | bytes) -> Any:
    """Return the value of a text that this process wrote itself, of any size and depth: a copy through JSON.

    Raises JsonError if it is nested too deeply for Python.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise JsonError("is nested too deeply") from None


def _check_depth(data: str, max_depth: int) -> None:
    if data.count("[") + data.count("{") > max_depth and depth_of(data, limit=max_depth) > max_depth:
        raise JsonError(f"is nested more than {max_depth} deep")


@lru_cache(maxsize=4)
def _decoder(finite: bool, unique_keys: bool) -> json.JSONDecoder:
    return json.JSONDecoder(
        parse_constant=_refuse_constant if finite else None,
        parse_float=_finite if finite else None,
        object_pairs_hook=_unique if unique_keys else None,
    )


def _refuse_constant(word: str) -> NoReturn:
    raise JsonError(f"holds {word}, which is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JsonError(f"holds {text[:_SHOWN_DIGITS]}, which is too large for a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonError(f"names {twice[:_SHOWN_DIGITS]!r} twice in one object")
    return found
