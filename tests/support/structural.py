"""Check whether a schema is structural, by the rules of apiextensions.k8s.io/v1 that tools without an API
server miss.

It is used before a real API server is asked: a violation here names the path, and the API server's own
message often does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zerotrain.operator.api.crd import INT_OR_STRING, PRESERVE

_TYPES = frozenset({"object", "array", "string", "integer", "number", "boolean"})
_KEYWORDS = frozenset(
    {
        *("additionalProperties", "anyOf", "default", "description", "enum", "format", "items", "maxItems"),
        *("maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum"),
        *("pattern", "properties", "required", "type", PRESERVE, INT_OR_STRING),
        *("x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type"),
        "x-kubernetes-validations",
    }
)
"""Keywords of a structural schema that this API uses; the API server drops or rejects anything else."""

_LIST_TYPES = frozenset({"atomic", "set", "map"})
_SCALARS = frozenset({"string", "integer", "number", "boolean"})


def violations(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield each rule that `schema` breaks, as `path: rule`."""
    here = path or "."
    for key in sorted(set(schema) - _KEYWORDS):
        yield f"{here}: {key} is not a keyword of a structural schema"
    yield from _type_violations(schema, here)
    if "properties" in schema and "additionalProperties" in schema:
        yield f"{here}: additionalProperties is not allowed together with properties"
    if schema.get("type") == "array":
        yield from _list_violations(schema, here)
    if schema.get("type") == "string" and not _is_bounded(schema) and not _is_exempt(path):
        yield f"{here}: a string needs maxLength, enum or format, else rules over it cost too much"
    for name, child in schema.get("properties", {}).items():
        yield from violations(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        child = schema.get(key)
        if isinstance(child, Mapping):
            yield from violations(child, f"{path}[]")
        elif child is not None:
            yield f"{here}: {key} must be a schema; got {child!r}"


def _type_violations(schema: Mapping[str, Any], here: str) -> Iterator[str]:
    if schema.get(INT_OR_STRING):
        if "type" in schema:
            yield f"{here}: type is not allowed together with {INT_OR_STRING}"
        if schema.get("anyOf") != [{"type": "integer"}, {"type": "string"}]:
            yield f"{here}: {INT_OR_STRING} needs anyOf of integer and string"
        return
    if schema.get("type") not in _TYPES:
        yield f"{here}: type must be one of {', '.join(sorted(_TYPES))}; got {schema.get('type')!r}"
    if "anyOf" in schema:
        yield f"{here}: anyOf hides the structure; flatten it"
    holds = {"properties", "additionalProperties", PRESERVE} & set(schema)
    if schema.get("type") == "object" and not holds and here != ".metadata":
        yield f"{here}: an object without properties prunes everything; say what it holds"
    if "default" in schema and schema.get("type") == "object" and schema["default"] == {}:
        yield f"{here}: an empty default has no effect"


def _list_violations(schema: Mapping[str, Any], here: str) -> Iterator[str]:
    if "items" not in schema:
        yield f"{here}: an array needs items"
        return
    if "maxItems" not in schema:
        yield f"{here}: an array needs maxItems, else rules over it cost too much"
    kind = schema.get("x-kubernetes-list-type")
    if kind not in _LIST_TYPES:
        yield f"{here}: x-kubernetes-list-type must be atomic, set or map; got {kind!r}"
    if kind == "set" and schema["items"].get("type") not in _SCALARS:
        yield f"{here}: a set holds scalars only"
    if kind == "map":
        item = schema["items"]
        for key in schema.get("x-kubernetes-list-map-keys", ()) or ("?",):
            if key not in item.get("properties", {}):
                yield f"{here}: list-map key {key} is no property of the items"
            elif key not in item.get("required", ()) and "default" not in item["properties"][key]:
                yield f"{here}: list-map key {key} must be required or have a default"


def _is_exempt(path: str) -> bool:
    # The operator alone writes the status and cuts its texts itself; no rule reads them.
    return path in (".apiVersion", ".kind") or path.startswith(".status.")


def _is_bounded(schema: Mapping[str, Any]) -> bool:
    return any(key in schema for key in ("maxLength", "enum", "format"))
