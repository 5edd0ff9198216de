"""The end of a job: deadlines and clean-up."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .base import ApiModel, Int, Seconds


class CleanPodPolicy(StrEnum):
    ALL = "All"
    RUNNING = "Running"
    NONE = "None"


class RunPolicy(ApiModel):
    """Deadlines and clean-up."""

    active_deadline_seconds: Seconds | None = None
    """The job fails once it has been active (not suspended) for so long; starts anew on resume. No deadline
    unless given."""

    ttl_seconds_after_finished: Annotated[Int, Field(ge=0, le=31_536_000)] | None = None
    """The finished job is deleted after so many seconds; 0 is at once. Kept unless given."""

    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    """Which pods are deleted when the job finishes: All, Running (those still running) or None. Running
    unless given."""

    termination_timeout_seconds: Seconds = 120
    """Seconds after its grace period at which a pod that does not go away is deleted by force; 120 unless
    given."""
