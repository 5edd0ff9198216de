"""The shape of one attempt: what its pods depend on beyond the spec, decided when it starts."""

from __future__ import annotations

from .base import Int, ObservedModel


class AttemptShape(ObservedModel):
    """Fixed for the attempt: a pod that is made again after a restart of the operator equals its peers."""

    workers: Int
    """Worker pods of the attempt; fewer than spec.workers after a job was shrunk."""

    excluded_nodes: tuple[str, ...] = ()
    """Nodes that the pods of the attempt must not run on: failures were laid at their door."""
