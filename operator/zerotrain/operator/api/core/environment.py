"""Environment variables of a container, with the names of Kubernetes' EnvVar and EnvFromSource."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, StringConstraints

from zerotrain.operator.api.base import (
    ATOMIC_MAP,
    ApiModel,
    Argument,
    Bool,
    FileKey,
    ObjectName,
    one_of,
    rule,
    unique_by,
)
from zerotrain.operator.api.quantity import AnyQuantity

_ENV_NAME = r"^[-._a-zA-Z][-._a-zA-Z0-9]*$"


class KeySelector(ApiModel):
    """One key of a ConfigMap or Secret in the job's namespace."""

    model_config = ConfigDict(json_schema_extra=ATOMIC_MAP)

    name: ObjectName
    """Name of the ConfigMap or Secret."""

    key: FileKey
    """Key in that object."""

    optional: Bool | None = None
    """Whether the variable stays unset if the object or key is missing; else the pod does not start."""


class FieldSelector(ApiModel):
    """A field of the pod itself."""

    model_config = ConfigDict(json_schema_extra=ATOMIC_MAP)

    api_version: Annotated[str, StringConstraints(max_length=32)] | None = None
    """Version of the schema that fieldPath is written in; v1 unless given."""

    field_path: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """Path such as metadata.name or status.podIP."""


class ResourceFieldSelector(ApiModel):
    """A resource of a container."""

    model_config = ConfigDict(json_schema_extra=ATOMIC_MAP)

    container_name: Annotated[str, StringConstraints(max_length=63)] | None = None
    """Container whose resource it is; the one that holds the variable unless given. Needed in a volume."""

    resource: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    """Resource such as limits.memory."""

    divisor: AnyQuantity | None = None
    """Unit of the value; 1 unless given."""


class EnvVarSource(ApiModel):
    """Source of a value; exactly one kind."""

    RULES = (one_of("fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef"),)

    field_ref: FieldSelector | None = None
    resource_field_ref: ResourceFieldSelector | None = None
    config_map_key_ref: KeySelector | None = None
    secret_key_ref: KeySelector | None = None


class EnvVar(ApiModel):
    """One environment variable."""

    RULES = (
        rule(
            "!has(self.value) || !has(self.valueFrom)",
            "value and valueFrom are mutually exclusive",
            holds=lambda self: self.value is None or self.value_from is None,
        ),
    )

    name: Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=_ENV_NAME)]
    """Name of the variable. The names that the operator sets itself are rejected."""

    value: Argument | None = None
    """Text of the variable; empty unless given."""

    value_from: EnvVarSource | None = None
    """Source of the text instead of `value`."""


class ObjectReference(ApiModel):
    """A ConfigMap or Secret as a whole."""

    model_config = ConfigDict(json_schema_extra=ATOMIC_MAP)

    name: ObjectName
    """Name of the object in the job's namespace."""

    optional: Bool | None = None
    """Whether a missing object is ignored."""


class EnvFromSource(ApiModel):
    """All keys of a ConfigMap or Secret as variables."""

    RULES = (one_of("configMapRef", "secretRef"),)

    prefix: Annotated[str, StringConstraints(max_length=128, pattern=_ENV_NAME)] | None = None
    """Prefix of every key."""

    config_map_ref: ObjectReference | None = None
    secret_ref: ObjectReference | None = None


EnvVars = Annotated[tuple[EnvVar, ...], Field(max_length=128), unique_by("name")]
EnvFromSources = Annotated[tuple[EnvFromSource, ...], Field(max_length=32)]
