"""End of a job or of an attempt: deadlines, requests to stop, clean-up, and the verification of the last
checkpoint."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AwareDatetime, Field

from .base import ApiModel, Bool, Int, ObservedModel, Seconds
from .lenient import OpenEnum


class CleanPodPolicy(StrEnum):
    ALL = "All"
    RUNNING = "Running"
    NONE = "None"


class RunPolicy(ApiModel):
    """Deadlines and clean-up."""

    active_deadline_seconds: Seconds | None = None
    """Seconds that the job may be active, from its first pod on, before it fails. Suspended time, time in a
    queue (queueName), in phase Stalled and after an attempt that gave back what it held (GaveBack) do not
    count: the clock starts anew with the next pod. No deadline unless given. May be changed at any time."""

    start_deadline_seconds: Seconds | None = None
    """Seconds after which an attempt ends if some worker has a node but its program has not started. It ends
    with the reason StartDeadlineExceeded and is followed by another, after a hold-off and at the cost of
    the infrastructure's budget; failurePolicy.rules may say otherwise. No such deadline unless given. An
    attempt of which some workers have nodes and others find none for so long (600 unless given) gives back
    all, at no cost (GaveBack); one of which no worker has a node waits on. May be changed at any time."""

    ttl_seconds_after_finished: Annotated[Int, Field(ge=0, le=31_536_000)] | None = None
    """Seconds after its end at which the job is deleted, but not before a requested verification of its
    checkpoint has ended; 0 is at once. Kept unless given. May be changed at any time."""

    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    """Pods that are deleted when the job finishes: All, Running (those still running) or None. Running unless
    given. May be changed at any time."""

    termination_timeout_seconds: Seconds = 120
    """Seconds after its grace period at which a pod that has not ended is deleted by force; 120 unless given.
    May be changed at any time."""


class VerificationState(OpenEnum):
    RUNNING = "Running"
    VERIFIED = "Verified"
    """Every byte is as it was written."""
    DAMAGED = "Damaged"
    """The checkpoint is not as it was written, or is gone."""
    UNKNOWN = "Unknown"
    """The state could not be determined; the message says why."""


class Verification(ObservedModel):
    """Verification of the newest checkpoint by a separate pod."""

    state: VerificationState
    """State: Running, Verified, Damaged (not as it was written, or gone), or Unknown (not determined)."""

    step: Int
    """Step of the checkpoint."""

    checkpoint: str = ""
    """Name of the checkpoint's folder."""

    pod: str = ""
    """Pod that reads the checkpoint, or did so last; its log lists everything that is wrong."""

    tries: Int = 0
    """Number of pods so far; one without a result is followed by another, up to three."""

    start_time: AwareDatetime
    """Time when it was decided; verifyTimeoutSeconds counts from it."""

    completion_time: AwareDatetime | None = None
    """Time when the outcome was known."""

    message: str = ""
    """Description of what is wrong, or of why the state could not be determined."""


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
