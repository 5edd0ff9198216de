"""Every string, list and map of a job's spec by the schema of the CRD, and specs with one value there.

Pure: takes the OpenAPI schema of the CRD, returns places and specs; `schema_values` says what to put there.
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
"""The first that a pattern takes stands where a string is required beside the one in question."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in spec a value can be hostile."""

    path: tuple[str, ...]
    schema: Schema

    def __str__(self) -> str:
        return re.sub(r"\.(\[\]|\{\})", r"\1", ".".join(("spec", *self.path)))


def places(schema: Schema) -> list[Place]:
    """All below the schema of spec, in its order."""
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
    """Whether a value there has a length, a depth or characters of its author's choice."""
    kind = schema.get("type")
    return kind in ("string", "array") or is_map(schema) or is_quantity(schema)


def is_map(schema: Schema) -> bool:
    return isinstance(schema.get("additionalProperties"), dict) or is_free(schema)


def is_free(schema: Schema) -> bool:
    """Free-form JSON."""
    return bool(schema.get("x-kubernetes-preserve-unknown-fields"))


def is_quantity(schema: Schema) -> bool:
    return bool(schema.get("x-kubernetes-int-or-string"))


def spec_with(root: Schema, base: Json, place: Place, value: Any) -> Json:
    """`base` with `value` at the place and the least that the schema wants around it."""
    top = place.path[0]
    spec = {**base, top: _around(root["properties"][top], place.path[1:], value)}
    if top in _EXCLUDED:
        spec.pop(_EXCLUDED[top], None)
    return {**spec, **companions(place.path, spec)}


_EXCLUDED = {"configFrom": "config"}


def companions(path: tuple[str, ...], spec: Json) -> Json:
    """What rules of the CRD across fields want beside a place."""
    top, rest = path[0], path[1:]
    if top == "args":
        return {"command": ["x"]}
    if top == "resources" and rest[:1] in (("pinnedMemory",), ("sharedMemory",)):
        return {"resources": {**spec["resources"], "memory": "100Ei"}}
    if top == "scheduling" and rest == ("topologyPolicy",):
        return {"scheduling": {**spec["scheduling"], "topologyKey": "zone"}}
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
    """The smallest value that the schema takes; those with different numbers differ where they can."""
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
    """Quantities stand in maps by the name of a resource."""
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
    """Properties of which the schema's rules want exactly one, or at least one."""
    for item in schema.get("x-kubernetes-validations", ()):
        if found := _UNION.match(item["rule"]) or _ANY.fullmatch(item["rule"]):
            return re.findall(r"self\.(\w+)", found[0])
    return []


def matches(pattern: str, text: str) -> bool:
    """As RE2 does it: there `$` is the very end."""
    return re.search(re.sub(r"(?<!\\)\$$", r"\\Z", pattern), text) is not None
