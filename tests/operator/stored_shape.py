"""Shape of the objects that the API server may hold of earlier releases: the schema as lines of text, and how
two schemas differ.

`python -m tests.operator.stored_shape > tests/operator/stored/v1alpha1.txt` takes the schema of this release
as the one that all later ones must be able to read; docs/upgrading.md says when.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerotrain.operator.api.crd import openapi_schema

STORED = Path(__file__).parent / "stored"
BASELINE = STORED / "v1alpha1.txt"

_KEPT = ("type", "format", "enum", "pattern", "default", "required", "x-kubernetes-list-map-keys")
_LOWER = ("minimum", "minLength", "minItems", "minProperties")
_UPPER = ("maximum", "maxLength", "maxItems", "maxProperties")

Facts = dict[str, Any]


def flattened(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Facts]]:
    """Yield every path of the schema with the facts that decide which values it accepts."""
    yield path or ".", {key: schema[key] for key in (*_KEPT, *_LOWER, *_UPPER) if key in schema}
    for name, child in schema.get("properties", {}).items():
        yield from flattened(child, f"{path}.{name}")
    if isinstance(schema.get("items"), Mapping):
        yield from flattened(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), Mapping):
        yield from flattened(schema["additionalProperties"], f"{path}{{}}")


def as_text(schema: Mapping[str, Any]) -> str:
    return "".join(f"{path} {json.dumps(facts, sort_keys=True)}\n" for path, facts in flattened(schema))


def from_text(text: str) -> dict[str, Facts]:
    rows = (line.split(" ", 1) for line in text.splitlines())
    return {path: json.loads(facts) for path, facts in rows}


def obstacles(old: Mapping[str, Facts], new: Mapping[str, Facts]) -> list[str]:
    """Return the reasons why an object of the old schema might be refused, pruned or read otherwise under the
    new one.
    """
    found = []
    for path, before in old.items():
        if path not in new:
            found.append(f"{path}: is gone, so that its value would be dropped")
        else:
            found += [f"{path}: {what}" for what in _narrowed(before, new[path])]
    return found


def _narrowed(before: Facts, after: Facts) -> Iterator[str]:
    for key in ("type", "format", "x-kubernetes-list-map-keys"):
        if before.get(key) != after.get(key):
            yield f"{key} was {before.get(key)} and is {after.get(key)}"
    if before.get("pattern") != after.get("pattern") and "pattern" in after:
        yield f"pattern was {before.get('pattern')} and is {after['pattern']}"
    if before.get("default") != after.get("default"):
        yield f"default was {before.get('default')} and is {after.get('default')}: what was left out changes"
    if "enum" in after and not set(before.get("enum", [None])) <= set(after["enum"]):
        yield f"values {before.get('enum')} became {after['enum']}"
    added = set(after.get("required", ())) - set(before.get("required", ()))
    if added:
        yield f"{sorted(added)} became required"
    for key in _LOWER:
        if after.get(key, 0) > before.get(key, 0):
            yield f"{key} rose from {before.get(key)} to {after[key]}"
    for key in _UPPER:
        if key in after and after[key] < before.get(key, float("inf")):
            yield f"{key} fell from {before.get(key)} to {after[key]}"


if __name__ == "__main__":
    print(as_text(openapi_schema()), end="")
