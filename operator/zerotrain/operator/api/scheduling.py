"""Scheduling of the workers: queue, gang, priority and placement."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .base import ATOMIC, ApiModel, DnsLabel, LabelMap, ObjectName, QualifiedName, rule
from .core.meta import Toleration


class Gang(StrEnum):
    AUTO = "Auto"
    NONE = "None"
    NATIVE = "Native"
    VOLCANO = "Volcano"
    COSCHEDULING = "Coscheduling"


class TopologyPolicy(StrEnum):
    COLOCATE = "Colocate"
    SPREAD = "Spread"


class Scheduling(ApiModel):
    """Queue, gang, priority and placement of the workers."""

    RULES = (
        rule(
            "!has(self.topologyPolicy) || has(self.topologyKey)",
            "topologyPolicy needs topologyKey",
            holds=lambda self: self.topology_policy is None or self.topology_key is not None,
            field_path=".topologyPolicy",
        ),
    )

    gang: Gang | None = None
    """Whether all workers are placed together or not at all. None, the default, schedules each pod alone.
    Native, Volcano and Coscheduling use that scheduler's pod group. Auto takes the first of them that the
    cluster serves, else None."""

    queue_name: DnsLabel | None = None
    """Kueue LocalQueue in the job's namespace that admits the job. No queue unless given."""

    scheduler_name: ObjectName | None = None
    """Scheduler of the workers. Unless given: volcano with gang Volcano, scheduler-plugins-scheduler with
    Coscheduling, the cluster's default otherwise."""

    priority_class_name: ObjectName | None = None
    """PriorityClass of the workers; the cluster's default unless given."""

    node_selector: LabelMap | None = None
    """Labels that the nodes of the workers must have."""

    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=64, json_schema_extra=ATOMIC)] = ()
    """Taints that the workers accept."""

    topology_key: QualifiedName | None = None
    """Node label, such as topology.kubernetes.io/zone, by which topologyPolicy places the workers."""

    topology_policy: TopologyPolicy | None = None
    """Placement by topologyKey. Colocate puts all workers on nodes that share one value of it; Spread puts
    them evenly over its values. Colocate unless given."""
