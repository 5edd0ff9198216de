"""What follows a failure: restarts, their budget, rules by kind of failure."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .base import ATOMIC, SET, ApiModel, Int, Seconds, rule


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
