"""The CustomResourceDefinition, generated from the pydantic models:
`python -m zerotrain.operator.api.crd > crds/zerotrain.dev_zerotrainingjobs.yaml`.

Pydantic writes JSON Schema 2020-12 with references; the API server wants a *structural* OpenAPI v3 schema:
references inlined, Optional flattened (the API server drops nulls itself), no `additionalProperties: false`
beside `properties`, no titles. Defaults that say "nothing" (null, empty) are left out, so that a field that
the user did not write stays absent. A test checks the result.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML

from zerotrain.operator.constants import GROUP, KIND, PLURAL, SHORT_NAME, SINGULAR, VERSION

from .job import ZeroTrainingJob

Schema = dict[str, Any]

_HEADER = """\
# Generated from the models in operator/zerotrain/operator/api; do not edit.
# python -m zerotrain.operator.api.crd > crds/zerotrain.dev_zerotrainingjobs.yaml
"""

PRESERVE = "x-kubernetes-preserve-unknown-fields"
INT_OR_STRING = "x-kubernetes-int-or-string"

# Pydantic writes a bound under its own name if one of our validators runs before the type's.
_BOUNDS = {"ge": "minimum", "le": "maximum"}

_OBJECT_FIELDS: dict[str, str] = {
    "apiVersion": "Version of the schema of this representation of an object, as group/version.",
    "kind": "Kind of the object: ZeroTrainingJob.",
}

PRINTER_COLUMNS: tuple[Schema, ...] = (
    {"name": "Phase", "type": "string", "jsonPath": ".status.phase", "description": "Where the job stands."},
    {
        "name": "Reason",
        "type": "string",
        "jsonPath": '.status.conditions[?(@.type=="Ready")].reason',
        "description": "What it waits for, or why it ended.",
    },
    {
        "name": "Step",
        "type": "integer",
        "jsonPath": ".status.progress.step",
        "description": "Optimizer steps done.",
    },
    {
        "name": "Ranks",
        "type": "string",
        "jsonPath": ".status.ranks.summary",
        "description": "Ranks ready / wanted.",
    },
    {
        "name": "Stage",
        "type": "integer",
        "jsonPath": ".status.zeroStage",
        "description": "ZeRO stage of the configuration.",
    },
    {
        "name": "Loss",
        "type": "number",
        "jsonPath": ".status.progress.loss",
        "priority": 1,
        "description": "Loss of the last step.",
    },
    {
        "name": "Tokens/s",
        "type": "number",
        "jsonPath": ".status.progress.tokensPerSecond",
        "description": "Tokens of all ranks per second.",
    },
    {
        "name": "Restarts",
        "type": "integer",
        "jsonPath": ".status.restarts.total",
        "description": "Restarts of all causes.",
    },
    {
        "name": "Checkpoint",
        "type": "integer",
        "jsonPath": ".status.checkpoint.last.step",
        "description": "Step of the newest checkpoint.",
    },
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedVersion:
    """One version of the API. All have the same schema and no conversion: etcd may hold objects of any
    version."""

    name: str
    storage: bool
    """Whether objects are stored in this version; true for exactly one version."""
    served: bool = True
    deprecation: str | None = None
    """Warning that `kubectl` prints to users of this version."""

    def entry(self, schema: Schema) -> Schema:
        """Return the entry for spec.versions."""
        warned: Schema = {}
        if self.deprecation is not None:
            warned = {"deprecated": True, "deprecationWarning": self.deprecation}
        return {
            "name": self.name,
            "served": self.served,
            "storage": self.storage,
            **warned,
            "additionalPrinterColumns": list(PRINTER_COLUMNS),
            "subresources": {
                "status": {},
                "scale": {
                    "specReplicasPath": ".spec.workers",
                    "statusReplicasPath": ".status.workers.running",
                    "labelSelectorPath": ".status.selector",
                },
            },
            "schema": {"openAPIV3Schema": schema},
        }


VERSIONS = (ServedVersion(name=VERSION, storage=True),)
"""Served versions. docs/upgrading.md says how a version is added, becomes the stored one, and is removed."""


def custom_resource_definition(versions: Sequence[ServedVersion] = VERSIONS) -> Schema:
    """Return the CRD as plain JSON. Raises ValueError unless exactly one version is stored."""
    stored = [version.name for version in versions if version.storage]
    if len(stored) != 1:
        raise ValueError(f"exactly one version must be the stored one; got {stored or 'none'}")
    schema = openapi_schema()
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
                "categories": ["all"],
            },
            "conversion": {"strategy": "None"},
            "versions": [version.entry(schema) for version in versions],
        },
    }


def openapi_schema() -> Schema:
    """Return the structural schema of ZeroTrainingJob."""
    source = ZeroTrainingJob.model_json_schema(by_alias=True)
    schema = _structural(source, source.pop("$defs"))
    properties = schema["properties"]
    for name, description in _OBJECT_FIELDS.items():
        properties[name] = {"type": "string", "description": description}
    # The API server validates metadata itself and lets a CRD only restrict the name, which the rules do.
    properties["metadata"] = {"type": "object"}
    # Values that the operator does not know are absent; a default would make the API server state them.
    _drop_defaults(properties["status"])
    schema["required"] = ["spec"]
    return schema


def _drop_defaults(schema: Schema) -> None:
    schema.pop("default", None)
    for child in schema.get("properties", {}).values():
        _drop_defaults(child)
    if "items" in schema:
        _drop_defaults(schema["items"])


def _structural(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    flat = _flattened(schema, definitions)
    extras = flat.pop("additionalProperties", None)
    if "properties" in flat:
        flat["properties"] = {
            name: _structural(child, definitions) for name, child in flat["properties"].items()
        }
    elif isinstance(extras, Mapping):
        flat["additionalProperties"] = _structural(extras, definitions)
    elif extras is True:
        flat[PRESERVE] = True
    if "items" in flat:
        flat["items"] = _structural(flat["items"], definitions)
    return _renamed(flat)


def _flattened(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """Resolve references and `X | None`; keys beside a reference override those of its target."""
    flat = dict(schema)
    while True:
        if "$ref" in flat:
            target = definitions[flat.pop("$ref").rsplit("/", 1)[-1]]
            flat = {**target, **flat}
        elif "anyOf" in flat and INT_OR_STRING not in flat:
            branches = [branch for branch in flat.pop("anyOf") if branch != {"type": "null"}]
            if len(branches) != 1:
                raise ValueError(f"a field must have one type; got {branches}; split it into two fields")
            flat = {**branches[0], **flat}
        else:
            return flat


def _renamed(flat: Schema) -> Schema:
    """Drop keys that say nothing, and fold texts into one line, as `kubectl explain` wraps them itself."""
    flat.pop("title", None)
    if flat.get("default") in (None, [], {}, ""):
        flat.pop("default", None)
    for ours, theirs in _BOUNDS.items():
        if ours in flat:
            flat[theirs] = flat.pop(ours)
    if "description" in flat:
        flat["description"] = " ".join(flat["description"].split())
    return flat


def as_yaml(*documents: Schema) -> str:
    """Return the documents as YAML text, with sorted keys."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = 110
    text = io.StringIO()
    yaml.dump_all(documents, text)
    return text.getvalue()


def render() -> str:
    """Return the CRD as YAML text."""
    return _HEADER + as_yaml(custom_resource_definition())


if __name__ == "__main__":
    sys.stdout.write(render())
