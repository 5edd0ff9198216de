"""Selectors, references and the metadata of a job, with Kubernetes' own names."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from zerotrain.operator.api.base import (
    ATOMIC,
    ATOMIC_MAP,
    ApiModel,
    Int,
    LabelMap,
    LabelValue,
    ObjectName,
    ObservedModel,
    QualifiedName,
)


class ObjectMeta(ObservedModel):
    """Part of metadata that the operator reads."""

    name: str
    namespace: str = "default"
    uid: str = ""
    """UID of the job; empty in a job file that no API server has stored yet."""

    generation: int = 0
    resource_version: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None


class LocalReference(ApiModel):
    """The name of an object in the job's namespace."""

    name: ObjectName
    """Name of the object."""


class SelectorOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class LabelRequirement(ApiModel):
    """A condition on one label."""

    key: QualifiedName
    """Label that the condition is about."""

    operator: SelectorOperator
    """Operator: In, NotIn, Exists or DoesNotExist."""

    values: Annotated[tuple[LabelValue, ...], Field(max_length=64, json_schema_extra=ATOMIC)] = ()
    """Values: for In and NotIn at least one, none otherwise."""


class LabelSelector(ApiModel):
    """Objects whose labels meet every condition."""

    # The operator copies it as a whole: two clients that apply it must not each own a half.
    model_config = ConfigDict(json_schema_extra=ATOMIC_MAP)

    match_labels: LabelMap | None = None
    """Labels that must exist with exactly these values."""

    match_expressions: Annotated[
        tuple[LabelRequirement, ...], Field(max_length=32, json_schema_extra=ATOMIC)
    ] = ()
    """Further conditions on labels."""


class TolerationOperator(StrEnum):
    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(ApiModel):
    """A taint that the workers accept."""

    key: QualifiedName | None = None
    """Key of the taint to tolerate; every taint when empty (then operator must be Exists)."""

    operator: TolerationOperator | None = None
    """Operator; Equal unless given."""

    value: LabelValue | None = None
    """Value of the taint; only with Equal."""

    effect: TaintEffect | None = None
    """Effect to tolerate; every effect unless given."""

    toleration_seconds: Annotated[Int, Field(ge=0)] | None = None
    """Seconds for which a NoExecute taint is tolerated; for ever unless given."""
