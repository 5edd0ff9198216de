"""The shape of one attempt: what its pods depend on beyond the spec, decided when it starts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .base import ATOMIC, Int, ObservedModel
from .core.meta import Toleration


class AttemptShape(ObservedModel):
    """Fixed for the attempt: a pod that is made again after a restart of the operator equals its peers."""

    workers: Int
    """Worker pods of the attempt; fewer than spec.workers after a job was shrunk."""

    excluded_nodes: Annotated[tuple[str, ...], Field(max_length=64, json_schema_extra=ATOMIC)] = ()
    """Nodes that the pods of the attempt must not run on: failures were laid at their door."""

    grace_period_seconds: Int | None = None
    """checkpoint.gracePeriodSeconds that the pods were made with, in seconds."""

    generation: Int = 0
    """Generation of the spec that the attempt was begun under."""

    frozen_hash: str = ""
    """Hash of the part of that spec which changes only while the job is suspended."""

    gang: str = ""
    """API version of the pod group that places the workers together; empty without a gang."""

    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that the nodes must have beyond spec.scheduling: from the queue."""

    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=128, json_schema_extra=ATOMIC)] = ()
    """Taints that the workers accept beyond spec.scheduling: from the queue."""

    scheduling_gates: Annotated[tuple[str, ...], Field(max_length=8, json_schema_extra=ATOMIC)] = ()
    """Gates of the pods that the queue opens, once it has chosen a place for each."""

    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the pods that the queue asks for."""

    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the pods that the queue asks for."""
