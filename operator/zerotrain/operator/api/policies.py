"""What happens over the life of a job: restarts, hangs, resizing, deadlines, clean-up."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from zerotrain.operator.constants import MAX_WORKERS

from .base import ATOMIC, SET, ApiModel, Int, rule

Seconds = Annotated[Int, Field(ge=1, le=31_536_000)]
"""1 second to 365 days."""


class Elastic(ApiModel):
    """Between which numbers of workers the job may be resized."""

    RULES = (
        rule(
            "self.minWorkers <= self.maxWorkers",
            "minWorkers must not exceed maxWorkers",
            holds=lambda self: self.min_workers <= self.max_workers,
            field_path=".minWorkers",
        ),
    )

    min_workers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)]
    """The fewest workers that the job goes on with."""

    max_workers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)]
    """The most workers that the job grows to."""


class FailureAction(StrEnum):
    FAIL_JOB = "FailJob"
    RESTART_ALL = "RestartAll"
    RESTART_ALL_IGNORE_BUDGET = "RestartAllIgnoreBudget"


class FailureReason(StrEnum):
    NODE_LOST = "NodeLost"
    PREEMPTED = "Preempted"
    EVICTED = "Evicted"
    OUT_OF_MEMORY = "OutOfMemory"
    HANG = "Hang"
    RENDEZVOUS_TIMEOUT = "RendezvousTimeout"
    RANK_FAILED = "RankFailed"


class FailureRule(ApiModel):
    """What to do after a failure of a certain kind."""

    RULES = (
        rule(
            "has(self.onExitCodes) || has(self.onReasons)",
            "at least one of onExitCodes, onReasons must be given",
            holds=lambda self: bool(self.on_exit_codes or self.on_reasons),
        ),
    )

    on_exit_codes: Annotated[
        tuple[Annotated[Int, Field(ge=1, le=255)], ...],
        Field(min_length=1, max_length=64, json_schema_extra=SET),
    ] = ()
    """Exit codes of the first failing rank, 1 to 255."""

    on_reasons: Annotated[
        tuple[FailureReason, ...], Field(min_length=1, max_length=16, json_schema_extra=SET)
    ] = ()
    """Reasons of the failure."""

    action: FailureAction
    """FailJob ends the job; RestartAll starts a new attempt and charges the budget; RestartAllIgnoreBudget
    does not charge it."""


class FailurePolicy(ApiModel):
    """How often the job is restarted after a failure. All ranks restart together, from the last durable
    checkpoint."""

    max_restarts: Annotated[Int, Field(ge=0, le=1000)] = 5
    """Restarts after failures of the training program before the job fails; 0 to 1000, 5 unless given. Those
    within windowSeconds count, and older ones until a step is gained. Preemptions and lost nodes do not."""

    window_seconds: Seconds = 3600
    """Length of the sliding window in which restarts are counted; 3600 unless given."""

    rules: Annotated[tuple[FailureRule, ...], Field(max_length=32, json_schema_extra=ATOMIC)] = ()
    """Rules by exit code or reason; the first that matches decides."""


class HangPolicy(ApiModel):
    """When a job whose step stopped moving counts as hung."""

    step_timeout_factor: Annotated[Int, Field(ge=2, le=1000)] | None = None
    """Hung after this many times the learned duration of a step, 2 to 1000."""

    min_timeout_seconds: Seconds | None = None
    """Never hung before so many seconds without a step."""

    startup_timeout_seconds: Seconds | None = None
    """Seconds that the first step of an attempt may take."""


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
