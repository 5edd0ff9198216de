"""Volumes and mounts of a pod, with the names of Kubernetes' Volume and VolumeMount.

hostPath is not among the sources: Pod Security "restricted" forbids it and a worker never needs the node's
own folders (nvme and checkpoint are first-class fields of the job).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from zerotrain.operator.api.base import (
    ATOMIC,
    ApiModel,
    Bool,
    DnsLabel,
    FileKey,
    Int,
    LabelMap,
    ObjectName,
    keyed_by,
    one_of,
    rule,
    unique_by,
)
from zerotrain.operator.api.quantity import Bytes
from zerotrain.operator.constants import RESERVED_PREFIX

from .environment import FieldSelector, ResourceFieldSelector
from .meta import LabelSelector

FileMode = Annotated[
    Int, Field(ge=0, le=0o777, description="Permission bits of the files; decimal in JSON, so 0400 is 256.")
]
RelativePath = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[^/]")]


_SOURCES = (
    "configMap",
    "secret",
    "emptyDir",
    "persistentVolumeClaim",
    "ephemeral",
    "nfs",
    "projected",
    "downwardAPI",
    "csi",
)
_UNRESERVED_NAME = rule(
    f"!self.name.startsWith('{RESERVED_PREFIX}')",
    f"names that start with {RESERVED_PREFIX} are reserved",
    holds=lambda self: not self.name.startswith(RESERVED_PREFIX),
    field_path=".name",
)


class AccessMode(StrEnum):
    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_ONLY_MANY = "ReadOnlyMany"
    READ_WRITE_MANY = "ReadWriteMany"
    READ_WRITE_ONCE_POD = "ReadWriteOncePod"


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
    """When true, a missing object or key is ignored."""


class SecretSource(ApiModel):
    """Keys of a Secret as files."""

    secret_name: ObjectName
    """Name of the Secret in the job's namespace."""

    items: KeysToPaths = ()
    default_mode: FileMode | None = None
    optional: Bool | None = None
    """When true, a missing object or key is ignored."""


class EmptyDirMedium(StrEnum):
    DISK = ""
    MEMORY = "Memory"


class EmptyDirSource(ApiModel):
    """A folder that lives as long as the pod."""

    medium: EmptyDirMedium | None = None
    """Memory makes it a tmpfs that counts against the containers' memory limits; the node's disk unless
    given."""

    size_limit: Bytes | None = None
    """The pod is evicted when the folder grows beyond it."""


class ClaimSource(ApiModel):
    """An existing PersistentVolumeClaim."""

    claim_name: ObjectName
    """Name of the claim in the job's namespace."""

    read_only: Bool | None = None
    """Mount it read-only."""


class NfsSource(ApiModel):
    """A folder of an NFS server. Pod Security "restricted" forbids it in pods: there, use a claim."""

    server: Annotated[str, StringConstraints(min_length=1, max_length=253)]
    """Host name or address of the server, as the node sees it."""

    path: Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern="^/")]
    """Exported path."""

    read_only: Bool | None = None
    """Mount it read-only."""


class VolumeResources(ApiModel):
    """Size of a claim."""

    requests: Annotated[dict[str, Bytes], Field(min_length=1, max_length=1)]
    """Exactly the key `storage`: the size asked for."""


class ClaimSpec(ApiModel):
    """Spec of the PersistentVolumeClaim that is made with the pod."""

    access_modes: Annotated[
        tuple[AccessMode, ...], Field(min_length=1, max_length=4, json_schema_extra=ATOMIC)
    ]
    """Usually ReadWriteOnce."""

    resources: VolumeResources
    storage_class_name: ObjectName | None = None
    """StorageClass; the cluster's default unless given."""

    selector: LabelSelector | None = None
    """Bind only to PersistentVolumes with these labels."""


class ClaimMetadata(ApiModel):
    """Labels and annotations of the claim."""

    labels: LabelMap | None = None
    """Labels of the claim."""

    annotations: dict[str, Annotated[str, Field(max_length=4096)]] | None = Field(default=None, max_length=32)
    """Annotations of the claim."""


class ClaimTemplate(ApiModel):
    """A PersistentVolumeClaim to make with the pod."""

    metadata: ClaimMetadata | None = None
    """Labels and annotations of the claim."""

    spec: ClaimSpec


class EphemeralSource(ApiModel):
    """A generic ephemeral volume: a claim that is created and deleted with the pod."""

    volume_claim_template: ClaimTemplate


class CsiSource(ApiModel):
    """An inline volume of a CSI driver."""

    driver: Annotated[str, StringConstraints(min_length=1, max_length=253)]
    """Name of the driver, as registered in the cluster."""

    read_only: Bool | None = None
    """Mount it read-only."""

    fs_type: Annotated[str, StringConstraints(max_length=63)] | None = None
    """File system; the driver's default unless given."""

    volume_attributes: (
        Annotated[dict[str, Annotated[str, Field(max_length=1024)]], Field(max_length=32)] | None
    ) = None
    """Parameters of the driver."""


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
    """When true, a missing object or key is ignored."""


class ProjectedToken(ApiModel):
    """A service-account token within a projected volume."""

    audience: Annotated[str, StringConstraints(max_length=256)] | None = None
    """Who the token is for; the API server unless given."""

    expiration_seconds: Annotated[Int, Field(ge=600, le=2**31)] | None = None
    """Life of the token in seconds, at least 600; 3600 unless given."""

    path: RelativePath
    """File name below the mount."""


class ProjectedDownward(ApiModel):
    """Fields of the pod within a projected volume."""

    items: DownwardItems = ()


class ProjectedSource(ApiModel):
    """One source of a projected volume; exactly one kind."""

    RULES = (one_of("configMap", "secret", "serviceAccountToken", "downwardAPI"),)

    config_map: ProjectedObject | None = None
    secret: ProjectedObject | None = None
    service_account_token: ProjectedToken | None = None
    downward_api: ProjectedDownward | None = Field(default=None, alias="downwardAPI")


class Projected(ApiModel):
    """Several sources in one folder."""

    sources: Annotated[
        tuple[ProjectedSource, ...], Field(min_length=1, max_length=16, json_schema_extra=ATOMIC)
    ]
    """Sources that share the folder."""

    default_mode: FileMode | None = None


class Volume(ApiModel):
    """A volume of the pod; exactly one source. hostPath is not offered (Pod Security "restricted")."""

    RULES = (one_of(*_SOURCES, note=" (hostPath is not allowed)"), _UNRESERVED_NAME)

    name: DnsLabel
    """Name that volumeMounts refer to."""

    config_map: ConfigMapSource | None = None
    secret: SecretSource | None = None
    empty_dir: EmptyDirSource | None = None
    persistent_volume_claim: ClaimSource | None = None
    ephemeral: EphemeralSource | None = None
    nfs: NfsSource | None = None
    projected: Projected | None = None
    downward_api: DownwardSource | None = Field(default=None, alias="downwardAPI")
    csi: CsiSource | None = None


class MountPropagation(StrEnum):
    NONE = "None"
    HOST_TO_CONTAINER = "HostToContainer"


class VolumeMount(ApiModel):
    """Where a volume appears in a container."""

    RULES = (
        rule(
            "!has(self.subPath) || !has(self.subPathExpr)",
            "give only one of subPath, subPathExpr",
            holds=lambda self: self.sub_path is None or self.sub_path_expr is None,
        ),
        _UNRESERVED_NAME,
    )

    name: DnsLabel
    """Name of a volume of podTemplate.volumes."""

    mount_path: Annotated[str, StringConstraints(min_length=2, max_length=1024, pattern=r"^/[^:]*$")]
    """Absolute path in the container; must not be one that the operator mounts itself."""

    sub_path: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """Folder of the volume to mount instead of its root."""

    sub_path_expr: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """As subPath, with $(NAME) replaced by the container's environment."""

    read_only: Bool | None = None
    """Mount it read-only."""

    mount_propagation: MountPropagation | None = None
    """Whether mounts made on the node later appear in the container; None unless given."""


Volumes = Annotated[
    tuple[Volume, ...], Field(max_length=64, json_schema_extra=keyed_by("name")), unique_by("name")
]
VolumeMounts = Annotated[
    tuple[VolumeMount, ...],
    Field(max_length=64, json_schema_extra=keyed_by("mountPath")),
    unique_by("mount_path"),
]
