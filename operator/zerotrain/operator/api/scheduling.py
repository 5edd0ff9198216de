"""Scheduling of the workers: queue, gang, priority and placement, and what one attempt's pods were given."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .base import ATOMIC, ApiModel, DnsLabel, Int, LabelMap, ObjectName, ObservedModel, QualifiedName, rule
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


class AttemptShape(ObservedModel):
    """Properties fixed for the attempt: a pod that is created again after a restart of the operator equals
    its peers."""

    workers: Int
    """Worker pods of the attempt; fewer than spec.workers after a job was shrunk."""

    excluded_nodes: Annotated[tuple[str, ...], Field(max_length=64, json_schema_extra=ATOMIC)] = ()
    """Nodes that the pods of the attempt must not run on, as failures were attributed to them."""

    grace_period_seconds: Int | None = None
    """Value of checkpoint.gracePeriodSeconds with which the pods were created, in seconds."""

    generation: Int = 0
    """Generation of the spec with which the attempt began."""

    frozen_hash: str = ""
    """Hash of the part of that spec which changes only while the job is suspended."""

    gang: str = ""
    """API version of the pod group that places the workers together; empty without a gang."""

    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that the queue requires of the nodes, beyond spec.scheduling."""

    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=128, json_schema_extra=ATOMIC)] = ()
    """Tolerations that the queue adds to those of spec.scheduling."""

    scheduling_gates: Annotated[tuple[str, ...], Field(max_length=8, json_schema_extra=ATOMIC)] = ()
    """Scheduling gates of the pods that the queue opens once it has chosen a place for each."""

    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the pods that the queue requires."""

    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the pods that the queue requires."""
