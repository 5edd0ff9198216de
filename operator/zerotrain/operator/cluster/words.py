"""JSON of the API server: read within bounds, by orjson (ADR 0032, 0044).

What a tenant's program said may hold half of a surrogate pair, which is no Unicode. The standard library
passes it on, the API server replaces it, and orjson refuses it; it must cost nobody a pass or a watch.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import orjson

from zerotrain.contract.json_text import depth_of

MAX_DEPTH = 512
"""Lists and objects within each other. Typed objects have a tenth of that."""


def read(text: bytes) -> Any:
    """Raises ValueError, and nothing else, where it is no JSON or too deep for those who read it."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return _read_patiently(text)


def _read_patiently(text: bytes) -> Any:
    depth = depth_of(text)
    if depth > MAX_DEPTH:
        raise ValueError(f"JSON that is nested {depth} deep; at most {MAX_DEPTH} levels are read")
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:  # from deep within the caller's own calls
        raise ValueError(f"JSON that is nested {depth} deep") from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def write(body: Any) -> bytes:
    """Raises TypeError for what JSON has no word for."""
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:
        return json.dumps(body, separators=(",", ":")).encode()
