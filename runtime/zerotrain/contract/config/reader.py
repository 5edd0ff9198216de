"""Reader of a configuration from a file, a JSON text, a base64 text or a mapping.

It accepts more than JSON: comments (`//`, `#`, `/* */`, also with quotes inside), trailing commas, any
Unicode space, byte order marks, underscores in numbers. A repeated key is an error that names both places.
Nothing is ever evaluated. The callers of `resolve` use it: engine, operator, `zerotrain config show`.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.contract.strict_json import JsonError, own_json, strict_json

from .errors import ConfigError
from .keys import ENDLESS
from .lexer import MAX_DEPTH, position, to_strict_json

MAX_BYTES = 4 << 20
"""Largest size of a configuration in bytes.

A larger file is something else, such as a checkpoint given by mistake.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawConfig:
    """The user's JSON values, before interpretation."""

    values: Mapping[str, Any]
    """The top-level object."""

    origin: str
    """Source of the values, for messages: a file name, `text`, `base64` or `mapping`."""


def load(source: Path | str | Mapping[str, Any]) -> RawConfig:
    """Read a configuration.

    Args:
        source: a path; or a text that is JSON (it begins with `{` after comments and spaces), the path of a
            file, or JSON in base64 (as DeepSpeed accepts); or a mapping, which is checked and copied.

    Raises:
        ConfigError: unreadable file, syntax error (with line and column), repeated key, not an object.
    """
    if isinstance(source, Mapping):
        return RawConfig(values=_from_mapping(source), origin="mapping")
    if isinstance(source, Path):
        return _load_file(source)
    if not isinstance(source, str):
        raise ConfigError(
            "config", "must be a path, a JSON text or a mapping", source, "Pass one of these three."
        )
    if "{" in source:
        return RawConfig(values=loads(source, origin="text"), origin="text")
    if _is_file(source):
        return _load_file(Path(source))
    decoded = _decode_base64(source)
    if decoded is None:
        raise ConfigError(
            "config",
            "must be an existing file, a JSON object or such an object in base64",
            source,
            "Check the path; a JSON text begins with {.",
        )
    return RawConfig(values=loads(decoded, origin="base64"), origin="base64")


def loads(text: str, *, origin: str = "text") -> dict[str, Any]:
    """Return the top-level object of a tolerant JSON text. Raises ConfigError for any error in it."""
    strict = to_strict_json(text, origin=origin)
    try:
        # A later step reports numbers too large for a float, by their keys.
        value = strict_json(strict, max_bytes=len(strict), finite=False)
    except JsonError as error:
        if error.offset is None:
            raise ConfigError(
                origin, f"must hold numbers that can be read ({error.reason})", "...", "Shorten it."
            ) from error
        offset = min(error.offset, len(text))
        raise ConfigError(
            position(origin, text, offset),
            f"must be JSON ({error.reason})",
            text.split("\n")[text.count("\n", 0, offset)].strip(),
            "Look for a missing comma, colon or bracket at or just before this place.",
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(origin, "must be a JSON object", value, "Put the keys between { and }.")
    return value


def _is_file(source: str) -> bool:
    try:
        return Path(source).exists()
    except (OSError, ValueError):  # too long for a file name, or it holds a null character
        return False


def _load_file(path: Path) -> RawConfig:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            "config", f"must be a readable file ({error.strerror})", str(path), "Check path and permissions."
        ) from error
    if len(data) > MAX_BYTES:
        raise ConfigError(
            "config", f"must be at most {MAX_BYTES} bytes", str(path), "Check which file was given."
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            "config",
            f"must be UTF-8 text ({error.reason} at byte {error.start})",
            str(path),
            "Save it as UTF-8.",
        ) from error
    return RawConfig(values=loads(text, origin=str(path)), origin=str(path))


def _decode_base64(source: str) -> str | None:
    compact = "".join(source.split())
    padded = compact + "=" * (-len(compact) % 4)
    try:
        text = base64.b64decode(padded.replace("-", "+").replace("_", "/"), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return text if "{" in text else None


def _from_mapping(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy through JSON, independent of the caller's mapping and with JSON types only."""
    try:
        value: dict[str, Any] = own_json(json.dumps(_plain(source)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            "config", f"must hold JSON values only ({error})", type(source).__name__, "Use JSON types."
        ) from error
    return value


def _plain(value: Any, path: str = "", depth: int = 1) -> Any:
    if depth > MAX_DEPTH and isinstance(value, Mapping | list | tuple):
        raise ConfigError(
            path.removesuffix("."),
            f"objects and lists may nest {MAX_DEPTH} deep",
            type(value).__name__,
            "This is not a training configuration; check what was given.",
        )
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{path}{key!r}", "a key must be a text", key, "Use text keys.")
        return {key: _plain(item, f"{path}{key}.", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, path, depth + 1) for item in value]
    _check_scalar(value, path.removesuffix("."))
    return value


def _check_scalar(value: Any, path: str) -> None:
    if not isinstance(value, str | int | float | None):
        raise ConfigError(path, "must be a JSON value", type(value).__name__, "Use JSON types.")
    is_endless = path in ENDLESS and value == math.inf
    if isinstance(value, float) and not math.isfinite(value) and not is_endless:
        raise ConfigError(path, "must be a finite number", value, "Write a finite number.")
