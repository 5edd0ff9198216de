"""ConfigMaps, Secrets and fields of the pod as files, with Kubernetes' own names.

serviceAccountToken is not among a projected volume's sources: worker pods carry no token. Otherwise any user
with permission to create jobs could use every account of the namespace.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from zerotrain.operator.api.base import (
    ATOMIC,
    ApiModel,
    Bool,
    FileKey,
    Int,
    ObjectName,
    one_of,
)
from zerotrain.operator.api.paths import RelativePath

from .environment import FieldSelector, ResourceFieldSelector

FileMode = Annotated[
    Int, Field(ge=0, le=0o777, description="Permission bits of the files; decimal in JSON, so 0400 is 256.")
]


class KeyToPath(ApiModel):
    """One key as one file."""

    key: FileKey
    """Key of the ConfigMap or Secret."""

    path: RelativePath
    """File name below the mount, without leading slash."""

    mode: FileMode | None = None
    """Permission bits of the file (decimal in JSON: 0400 is 256); defaultMode unless given."""


KeysToPaths = Annotated[
    tuple[KeyToPath, ...],
    Field(
        max_length=64,
        json_schema_extra=ATOMIC,
        description="Keys to show as files; all of them unless given.",
    ),
]


class ConfigMapSource(ApiModel):
    """Keys of a ConfigMap as files."""

    name: ObjectName
    """Name of the object in the job's namespace."""

    items: KeysToPaths = ()
    default_mode: FileMode | None = None
    optional: Bool | None = None
    """Whether a missing object or key is ignored."""


class SecretSource(ApiModel):
    """Keys of a Secret as files."""

    secret_name: ObjectName
    """Name of the Secret in the job's namespace."""

    items: KeysToPaths = ()
    default_mode: FileMode | None = None
    optional: Bool | None = None
    """Whether a missing object or key is ignored."""


class DownwardItem(ApiModel):
    """One field of the pod as one file."""

    path: RelativePath
    """File name below the mount."""

    field_ref: FieldSelector | None = None
    resource_field_ref: ResourceFieldSelector | None = None
    mode: FileMode | None = None


DownwardItems = Annotated[
    tuple[DownwardItem, ...],
    Field(max_length=32, json_schema_extra=ATOMIC, description="Fields of the pod to show as files."),
]


class DownwardSource(ApiModel):
    """Fields of the pod as files."""

    items: DownwardItems = ()
    default_mode: FileMode | None = None


class ProjectedObject(ApiModel):
    """A ConfigMap or Secret within a projected volume."""

    name: ObjectName
    """Name of the object in the job's namespace."""

    items: KeysToPaths = ()
    optional: Bool | None = None
    """Whether a missing object or key is ignored."""


class ProjectedDownward(ApiModel):
    """Fields of the pod within a projected volume."""

    items: DownwardItems = ()


class ProjectedSource(ApiModel):
    """One source of a projected volume; exactly one kind. serviceAccountToken is not offered."""

    RULES = (
        one_of(
            "configMap",
            "secret",
            "downwardAPI",
            note=" (serviceAccountToken is not offered: worker pods carry no token; give the program's "
            "credentials in a Secret)",
        ),
    )

    config_map: ProjectedObject | None = None
    secret: ProjectedObject | None = None
    downward_api: ProjectedDownward | None = Field(default=None, alias="downwardAPI")


class Projected(ApiModel):
    """Several sources in one folder."""

    sources: Annotated[
        tuple[ProjectedSource, ...], Field(min_length=1, max_length=16, json_schema_extra=ATOMIC)
    ]
    """Sources that share the folder."""

    default_mode: FileMode | None = None
