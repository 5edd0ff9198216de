"""PersistentVolumeClaims of a pod: existing ones, and ones that are created and deleted with it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from zerotrain.operator.api.base import (
    ATOMIC,
    ApiModel,
    Bool,
    LabelMap,
    ObjectName,
)
from zerotrain.operator.api.quantity import Bytes

from .meta import LabelSelector


class AccessMode(StrEnum):
    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_ONLY_MANY = "ReadOnlyMany"
    READ_WRITE_MANY = "ReadWriteMany"
    READ_WRITE_ONCE_POD = "ReadWriteOncePod"


class ClaimSource(ApiModel):
    """An existing PersistentVolumeClaim."""

    claim_name: ObjectName
    """Name of the claim in the job's namespace."""

    read_only: Bool | None = None
    """Whether it is mounted read-only."""


class VolumeResources(ApiModel):
    """Size of a claim."""

    requests: Annotated[dict[str, Bytes], Field(min_length=1, max_length=1)]
    """Requested size, under the only key `storage`."""


class ClaimSpec(ApiModel):
    """Spec of the PersistentVolumeClaim that is created with the pod."""

    access_modes: Annotated[
        tuple[AccessMode, ...], Field(min_length=1, max_length=4, json_schema_extra=ATOMIC)
    ]
    """Access modes, usually ReadWriteOnce."""

    resources: VolumeResources
    storage_class_name: ObjectName | None = None
    """StorageClass; the cluster's default unless given."""

    selector: LabelSelector | None = None
    """Labels of the PersistentVolumes that it may bind to."""


class ClaimMetadata(ApiModel):
    """Labels and annotations of the claim."""

    labels: LabelMap | None = None
    """Labels of the claim."""

    annotations: dict[str, Annotated[str, Field(max_length=4096)]] | None = Field(default=None, max_length=32)
    """Annotations of the claim."""


class ClaimTemplate(ApiModel):
    """PersistentVolumeClaim to create with the pod."""

    metadata: ClaimMetadata | None = None
    """Labels and annotations of the claim."""

    spec: ClaimSpec


class EphemeralSource(ApiModel):
    """A generic ephemeral volume: a claim that is created and deleted with the pod."""

    volume_claim_template: ClaimTemplate
