"""The schema is structural, documented and bounded; the checker finds each kind of violation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.structural import violations
from zerotrain.operator.api.crd import INT_OR_STRING, PRESERVE, openapi_schema

pytestmark = pytest.mark.unit


Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "maxLength": 8}


def _walk(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from _walk(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from _walk(schema[key], f"{path}[]")


def test_the_schema_is_structural() -> None:
    assert list(violations(openapi_schema())) == []


def test_every_field_is_documented() -> None:
    bare = [
        path
        for path, schema in _walk(openapi_schema())
        if path and not path.endswith("[]") and path != ".metadata" and not schema.get("description")
    ]
    assert bare == []


def test_unknown_fields_are_kept_in_two_places_alone() -> None:
    kept = [path for path, schema in _walk(openapi_schema()) if schema.get(PRESERVE)]
    assert kept == [".spec.config", ".spec.model.factory.args"]


def test_fields_without_behaviour_have_no_default() -> None:
    defaults = {path for path, schema in _walk(openapi_schema()) if "default" in schema}
    for field in (".spec.nvme.encryption", ".spec.elastic", ".spec.hangPolicy", ".spec.scheduling.gang"):
        assert not any(path.startswith(field) for path in defaults)
    assert not any(path.startswith(".status") for path in defaults)
    assert {".spec.workers", ".spec.suspend", ".spec.managedBy", ".spec.nvme.mountPath"} <= defaults


def test_conditions_merge_by_type() -> None:
    conditions = dict(_walk(openapi_schema()))[".status.conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


PLANTED: list[tuple[str, Schema, str]] = [
    ("reference", {"type": "object", "properties": {"a": {"$ref": "#/x"}}}, ".a: $ref is not a keyword"),
    ("title", {"type": "object", "properties": {"a": {**TEXT, "title": "A"}}}, ".a: title is not a keyword"),
    ("no-type", {"type": "object", "properties": {"a": {"maxLength": 3}}}, ".a: type must be one of"),
    ("wrong-type", {"type": "object", "properties": {"a": {"type": "null"}}}, ".a: type must be one of"),
    (
        "both",
        {"type": "object", "properties": {"a": TEXT}, "additionalProperties": TEXT},
        ".: additionalProperties is not allowed together with properties",
    ),
    (
        "false",
        {"type": "object", "properties": {"a": {"type": "object", "additionalProperties": False}}},
        ".a: additionalProperties must be a schema",
    ),
    ("nullable-union", {"type": "object", "properties": {"a": {**TEXT, "anyOf": []}}}, ".a: anyOf hides"),
    ("opaque", {"type": "object", "properties": {"a": {"type": "object"}}}, ".a: an object without"),
    (
        "unbounded-text",
        {"type": "object", "properties": {"a": {"type": "string"}}},
        ".a: a string needs maxLength",
    ),
    (
        "unbounded-list",
        {
            "type": "object",
            "properties": {"a": {"type": "array", "items": TEXT, "x-kubernetes-list-type": "set"}},
        },
        ".a: an array needs maxItems",
    ),
    (
        "list-type",
        {"type": "object", "properties": {"a": {"type": "array", "items": TEXT, "maxItems": 3}}},
        ".a: x-kubernetes-list-type must be",
    ),
    (
        "list-key",
        {
            "type": "object",
            "properties": {
                "a": {
                    "type": "array",
                    "maxItems": 3,
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["name"],
                    "items": {"type": "object", "properties": {"name": TEXT}},
                }
            },
        },
        ".a: list-map key name must be required",
    ),
    (
        "int-or-string",
        {"type": "object", "properties": {"a": {INT_OR_STRING: True, "type": "string", "maxLength": 3}}},
        f".a: type is not allowed together with {INT_OR_STRING}",
    ),
]


@pytest.mark.parametrize(("schema", "expected"), [case[1:] for case in PLANTED], ids=[c[0] for c in PLANTED])
def test_the_checker_finds(schema: Schema, expected: str) -> None:
    assert any(found.startswith(expected) for found in violations(schema)), list(violations(schema))
