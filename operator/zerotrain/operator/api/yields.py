"""Requests to checkpoint and stop, as the status keeps them."""

from __future__ import annotations

from pydantic import AwareDatetime

from .base import Bool, ObservedModel
from .lenient import OpenEnum


class YieldReason(OpenEnum):
    SUSPEND = "Suspend"
    """The user set spec.suspend to true."""
    QUEUE_EVICTION = "QueueEviction"
    """The queue that admitted the job reclaims its resources."""
    DRAIN = "Drain"
    """A worker has to leave its node, as in a node drain; all workers move together."""
    RESIZE = "Resize"
    """The job goes on with another number of workers."""


class YieldRequest(ObservedModel):
    """One request; it stands until the pods of its attempt are gone."""

    reason: YieldReason
    """Reason why the ranks stop."""

    requested_at: AwareDatetime
    """Time of the decision."""

    message: str = ""
    """Cause of the request, for people."""

    joined: Bool = True
    """Whether the ranks had met: before that there is nothing to save, and their pods are ended at once."""
