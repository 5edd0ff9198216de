"""Every string, list and map of a job's spec by the schema of the CRD, and specs with one value there.

The module has no I/O: it takes the OpenAPI schema of the CRD, and returns places and specs. `schema_values`
provides the values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Schema = Mapping[str, Any]

ITEM, VALUE = "[]", "{}"
"""Steps of a path into a list and into a map; every other step is the name of a property."""

_UNION = re.compile(r"\[((?:has\(self\.\w+\)(?:, )?)+)\]\.exists_one")
_ANY = re.compile(r"has\(self\.\w+\)( \|\| has\(self\.\w+\))+")
_PLAIN_TEXTS = ("a", "/a", "a/a", "m:f", "1", "Exists", "metadata.name", "::/1")
"""Candidates for required strings beside the hostile value; the first that matches the pattern is used.
"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place in spec at which a value can be hostile."""

    path: tuple[str, ...]
    schema: Schema

    def __str__(self) -> str:
        return re.sub(r"\.(\[\]|\{\})", r"\1", ".".join(("spec", *self.path)))


def places(schema: Schema) -> list[Place]:
    """Return all places below the schema of spec, in its order."""
    return list(_walk((), schema))


def _walk(path: tuple[str, ...], schema: Schema) -> Iterator[Place]:
    if path and is_hostile(schema):
        yield Place(path=path, schema=schema)
    for name, part in schema.get("properties", {}).items():
        yield from _walk((*path, name), part)
    for key, step in (("items", ITEM), ("additionalProperties", VALUE)):
        if isinstance(part := schema.get(key), dict):
            yield from _walk((*path, step), part)


def is_hostile(schema: Schema) -> bool:
    """Return whether the author of a value there chooses its length, depth or characters."""
    kind = schema.get("type")
    return kind in ("string", "array") or is_map(schema) or is_quantity(schema)


def is_map(schema: Schema) -> bool:
    return isinstance(schema.get("additionalProperties"), dict) or is_free(schema)


def is_free(schema: Schema) -> bool:
    """Return whether the schema accepts free-form JSON."""
    return bool(schema.get("x-kubernetes-preserve-unknown-fields"))


def is_quantity(schema: Schema) -> bool:
    return bool(schema.get("x-kubernetes-int-or-string"))


def spec_with(root: Schema, base: Json, place: Place, value: Any) -> Json:
    """Return `base` with `value` at the place and the minimum that the schema requires around it."""
    top = place.path[0]
    spec = {**base, top: _around(root["properties"][top], place.path[1:], value)}
    for name in _EXCLUDED.get(top, ()):
        spec.pop(name, None)
    return {**spec, **companions(place.path, spec)}


_EXCLUDED = {"configFrom": ("config",), "finetune": ("model", "data")}


_CHECKPOINT: Json = {"volume": {"emptyDir": {}}}


def companions(path: tuple[str, ...], spec: Json) -> Json:
    """Return the fields that rules of the CRD across fields require beside a place."""
    top, rest = path[0], path[1:]
    if top == "args":
        return {"command": ["x"]}
    if top == "resources" and rest[:1] in (("pinnedMemory",), ("sharedMemory",)):
        return {"resources": {**spec["resources"], "memory": "100Ei"}}
    if top == "scheduling" and rest == ("topologyPolicy",):
        return {"scheduling": {**spec["scheduling"], "topologyKey": "zone"}}
    if top == "finetune":
        given = {"learningRate": 1, **({"method": "lora"} if rest[:1] == ("lora",) else {})}
        return {"finetune": {**spec["finetune"], **given}, "checkpoint": _CHECKPOINT}
    return {}


def _around(schema: Schema, path: tuple[str, ...], value: Any) -> Any:
    if not path:
        return value
    step, rest = path[0], path[1:]
    if step == ITEM:
        return [_around(schema["items"], rest, value)]
    if step == VALUE:
        return {_map_key(schema): _around(schema["additionalProperties"], rest, value)}
    members = union(schema)
    found = {name: least(part) for name, part in _required(schema) if name != step}
    if members and step not in members:
        found[members[0]] = least(schema["properties"][members[0]])
    return {**found, step: _around(schema["properties"][step], rest, value)}


def least(schema: Schema, number: int = 0) -> Any:
    """Return the smallest value that the schema accepts; different numbers differ if possible."""
    if "default" in schema:
        return schema["default"]
    if "enum" in schema:
        return schema["enum"][0]
    if is_quantity(schema):
        return 1 + number
    kind = schema.get("type")
    if kind == "object":
        return _least_object(schema, number)
    if kind == "array":
        return [least(schema["items"], at) for at in range(schema.get("minItems", 0))]
    if kind in ("integer", "number"):
        return int(schema.get("minimum", 0)) + number
    return False if kind == "boolean" else _least_text(schema, number)


def _least_object(schema: Schema, number: int) -> Json:
    found = {name: least(part, number) for name, part in _required(schema)}
    for member in union(schema)[:1]:
        found[member] = least(schema["properties"][member], number)
    if isinstance(part := schema.get("additionalProperties"), dict):
        count = schema.get("minProperties", 0)
        found |= {f"{_map_key(schema)}{at or ''}": least(part) for at in range(count)}
    return found


def _map_key(schema: Schema) -> str:
    """Return a key for a map; maps of quantities have names of resources as keys."""
    return "storage" if is_quantity(schema["additionalProperties"]) else "a"


def _least_text(schema: Schema, number: int) -> str:
    pattern = schema.get("pattern", "")
    for text in _PLAIN_TEXTS:
        text = f"{text}{number}" if number else text
        if len(text) >= schema.get("minLength", 0) and matches(pattern, text):
            return text
    raise ValueError(f"no plain text matches {pattern!r}: add one to _PLAIN_TEXTS")


def _required(schema: Schema) -> Iterator[tuple[str, Schema]]:
    for name in schema.get("required", ()):
        yield name, schema["properties"][name]


def union(schema: Schema) -> list[str]:
    """Return properties of which the schema's rules require exactly one, or at least one."""
    for item in schema.get("x-kubernetes-validations", ()):
        if found := _UNION.match(item["rule"]) or _ANY.fullmatch(item["rule"]):
            return re.findall(r"self\.(\w+)", found[0])
    return []


def matches(pattern: str, text: str) -> bool:
    """Match as RE2 does: there `$` is the very end."""
    return re.search(re.sub(r"(?<!\\)\$$", r"\\Z", pattern), text) is not None
