"""The base of every API model and the small words that its fields are declared with.

A model is the single source of a part of the API: types, bounds and defaults are pydantic's, the docstring
under a field is what `kubectl explain` prints, and what OpenAPI cannot say stands beside it as a CEL rule.
`crd.py` turns all of it into the CustomResourceDefinition.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, StringConstraints
from pydantic.alias_generators import to_camel

RULES = "x-kubernetes-validations"

Rule = dict[str, Any]
"""One entry of x-kubernetes-validations."""


class ApiModel(BaseModel):
    """A part of the spec: camelCase in the API, unknown keys are an error, instances never change."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )


class ObservedModel(ApiModel):
    """A part that the operator reads back: a newer operator may have written keys that we do not know."""

    model_config = ConfigDict(extra="ignore")


def _whole_number(value: object) -> object:
    """Accept 1e3 as the API server does: JSON has one kind of number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


Int = Annotated[int, Strict(), BeforeValidator(_whole_number)]
"""A whole number; neither "8" nor true passes for one, as in the API server."""

Bool = Annotated[bool, Strict()]
Number = Annotated[float, Field(strict=True)]

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
QUALIFIED_NAME = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
)
LABEL_VALUE = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"

DnsLabel = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=DNS_LABEL)]
ObjectName = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)]
QualifiedName = Annotated[str, StringConstraints(min_length=1, max_length=317, pattern=QUALIFIED_NAME)]
LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=LABEL_VALUE)]
LabelMap = Annotated[dict[str, LabelValue], Field(max_length=64)]
AbsolutePath = Annotated[
    str, StringConstraints(min_length=2, max_length=1024, pattern=r"^/[^:\x00]*[^/:\x00]$")
]
"""An absolute path that names a folder below the root, without a final slash."""

FileKey = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
"""A key of a ConfigMap or Secret."""

Argument = Annotated[str, StringConstraints(max_length=8192)]


def rule(cel: str, message: str, *, field_path: str | None = None) -> Rule:
    """A CEL rule; `field_path` names the property below the rule's own place that the error points to."""
    entry: Rule = {"rule": cel, "message": message}
    if field_path is not None:
        entry["fieldPath"] = field_path
    return entry


def rules(*entries: Rule) -> dict[str, Any]:
    """For `json_schema_extra` of a model or field."""
    return {RULES: list(entries)}


def keyed_by(*keys: str) -> dict[str, Any]:
    """A list whose items merge by `keys` under server-side apply."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
"""A list that is replaced as a whole."""

SET: dict[str, Any] = {"x-kubernetes-list-type": "set"}
ATOMIC_MAP: dict[str, Any] = {"x-kubernetes-map-type": "atomic"}
