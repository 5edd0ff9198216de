"""Requests to checkpoint and stop, as status keeps them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from .base import Bool, ObservedModel


class YieldReason(StrEnum):
    SUSPEND = "Suspend"
    """spec.suspend became true."""
    QUEUE_EVICTION = "QueueEviction"
    """The queue that admitted the job wants its resources back."""
    DRAIN = "Drain"
    """A worker has to leave its node; all move together."""
    RESIZE = "Resize"
    """The job goes on with another number of workers."""


class YieldRequest(ObservedModel):
    """One request; it stands until the pods of its attempt are gone."""

    reason: YieldReason
    """What the ranks stop for."""

    requested_at: datetime
    """When it was decided."""

    message: str = ""
    """What led to it, for people."""

    joined: Bool = True
    """Whether the ranks had met: before that there is nothing to save, and their pods are ended at once."""
