"""Shape of one attempt: properties of its pods beyond the spec, decided when it starts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .base import ATOMIC, Int, ObservedModel
from .core.meta import Toleration


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
