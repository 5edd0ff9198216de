"""Large fields of a spec as JSON text, in memory between the passes of their job.

As values of Python, a text of small lists and objects takes twenty times its length, and a tenant may store
thousands of jobs with such fields. `job_text` packs them; the model of a spec unpacks them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zerotrain.contract.strict_json import own_json


class Packed(bytes):
    """JSON text of one field."""


def packed(value: Any) -> Packed:
    """Return the JSON text of a value, half surrogate pairs included; a packed value as it is."""
    if isinstance(value, Packed):
        return value
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return Packed(text.encode("utf-8", "surrogatepass"))


def unpacked(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec with the values of its packed fields."""
    return {
        name: own_json(value.decode("utf-8", "surrogatepass")) if isinstance(value, Packed) else value
        for name, value in spec.items()
    }
