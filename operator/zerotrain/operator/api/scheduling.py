"""Where and when the workers are scheduled."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .base import ATOMIC, ApiModel, DnsLabel, LabelMap, ObjectName, QualifiedName
from .core.meta import Toleration


class Gang(StrEnum):
    AUTO = "Auto"
    NONE = "None"
    NATIVE = "Native"
    VOLCANO = "Volcano"
    COSCHEDULING = "Coscheduling"


class Scheduling(ApiModel):
    """Where and when the workers are scheduled."""

    gang: Gang | None = None
    """Whether all workers must be placed together: Auto takes what the cluster has, None schedules each pod
    alone; Native, Volcano and Coscheduling name the mechanism."""

    queue_name: DnsLabel | None = None
    """Kueue LocalQueue that admits the job."""

    priority_class_name: ObjectName | None = None
    """PriorityClass of the workers; the cluster's default unless given."""

    node_selector: LabelMap | None = None
    """Labels that the nodes of the workers must have."""

    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=64, json_schema_extra=ATOMIC)] = ()
    """Taints that the workers accept."""

    topology_key: QualifiedName | None = None
    """Node label, such as topology.kubernetes.io/zone, whose value all workers must share."""
