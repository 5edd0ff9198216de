"""The end of a job: deadlines, clean-up, and what became of its last checkpoint."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .base import ApiModel, Int, ObservedModel, Seconds


class CleanPodPolicy(StrEnum):
    ALL = "All"
    RUNNING = "Running"
    NONE = "None"


class RunPolicy(ApiModel):
    """Deadlines and clean-up."""

    active_deadline_seconds: Seconds | None = None
    """The job fails once it has been active for so long, from its first pod on. Suspended time, time in a
    queue (queueName), in phase Stalled and after an attempt that gave back what it held (GaveBack) do not
    count: the clock starts anew with the next pod. No deadline unless given. May be changed at any time."""

    start_deadline_seconds: Seconds | None = None
    """An attempt of which some worker has a node and its program has not started after so many seconds ends
    with the reason StartDeadlineExceeded and is followed by another, after a hold-off and at the cost of the
    infrastructure's budget; failurePolicy.rules may say otherwise. Unless given there is no such deadline.
    An attempt of which some workers have nodes and others find none for so long (600 unless given) gives back
    all, at no cost (GaveBack); one of which no worker has a node waits on. May be changed at any time."""

    ttl_seconds_after_finished: Annotated[Int, Field(ge=0, le=31_536_000)] | None = None
    """The finished job is deleted after so many seconds, and after the verification of its checkpoint where
    one is asked for; 0 is at once. Kept unless given. May be changed at any time."""

    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    """Which pods are deleted when the job finishes: All, Running (those still running) or None. Running
    unless given. May be changed at any time."""

    termination_timeout_seconds: Seconds = 120
    """Seconds after its grace period at which a pod that does not go away is deleted by force; 120 unless
    given. May be changed at any time."""


class VerificationState(StrEnum):
    RUNNING = "Running"
    VERIFIED = "Verified"
    """Every byte is as it was written."""
    DAMAGED = "Damaged"
    """It is not as it was written, or gone."""
    UNKNOWN = "Unknown"
    """It could not be told; the message says why."""


class Verification(ObservedModel):
    """The verification of the newest checkpoint by a pod of its own."""

    state: VerificationState
    """Running, Verified, Damaged (not as it was written, or gone), or Unknown when it could not be told."""

    step: Int
    """Step of the checkpoint."""

    checkpoint: str = ""
    """Name of its folder."""

    pod: str = ""
    """Pod that reads it, or did so last; its log lists everything that is wrong."""

    tries: Int = 0
    """Pods so far; one that could not tell is followed by another, up to three."""

    start_time: datetime
    """When it was decided; verifyTimeoutSeconds counts from it."""

    completion_time: datetime | None = None
    """When the outcome was known."""

    message: str = ""
    """What is wrong, or why it could not be told."""
