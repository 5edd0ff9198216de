"""JSON of the API server: read within bounds, by orjson (ADR 0032, 0044).

What a tenant's program said may hold half of a surrogate pair, which is no Unicode. The standard library
passes it on, the API server replaces it, and orjson refuses it; it must cost nobody a pass or a watch.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from zerotrain.contract.json_text import read_json


def read(text: bytes) -> Any:
    """Raises ValueError, and nothing else, where it is no JSON or too deep for those who read it."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return read_json(text)


def write(body: Any) -> bytes:
    """Raises TypeError for what JSON has no word for."""
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:
        return json.dumps(body, separators=(",", ":")).encode()
