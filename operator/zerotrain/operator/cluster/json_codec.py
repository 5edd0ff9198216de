"""JSON of the API server, read within bounds by orjson (ADR 0044, 0058).

The output of a tenant's program may contain half of a surrogate pair, which is not valid Unicode. The
standard library passes it on, the API server replaces it, and orjson rejects it; it must not cost a pass or a
watch.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from zerotrain.contract.json_text import read_json


def read(text: bytes) -> Any:
    """Parse JSON. Raises ValueError, and nothing else, for text that is no JSON or too deeply nested."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return read_json(text)


def write(body: Any) -> bytes:
    """Serialise to JSON. Raises TypeError for values that JSON cannot express."""
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:
        return json.dumps(body, separators=(",", ":")).encode()
