"""Range of sizes to which a job may be resized, and the operator's decisions about its size."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import AwareDatetime, Field

from zerotrain.operator.constants import MAX_WORKERS

from .base import ApiModel, Int, ObservedModel, Seconds, rule
from .lenient import OpenEnum

DEFAULT_SHRINK_AFTER_S = 120
DEFAULT_GROW_AFTER_S = 300


class Elastic(ApiModel):
    """Range of worker numbers to which the job may be resized. A resize is a checkpoint and a new attempt;
    the global batch stays as it is at the size with which the job first started, and
    gradient_accumulation_steps follows the number of ranks. Its parts may be changed at any time; it is given
    or removed only while the job is suspended."""

    RULES = (
        rule(
            "self.minWorkers <= self.maxWorkers",
            "minWorkers must not exceed maxWorkers",
            holds=lambda self: self.min_workers <= self.max_workers,
            field_path=".minWorkers",
        ),
    )

    min_workers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)]
    """Smallest number of workers that the job goes on with, 1 to 10000."""

    max_workers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)]
    """Largest number of workers that spec.workers (kubectl scale) may ask for, 1 to 10000."""

    shrink_after_seconds: Seconds | None = None
    """Seconds without nodes, or quota, for all workers after which an attempt goes on with fewer; 120 unless
    given. Time in a queue does not count."""

    grow_after_seconds: Seconds | None = None
    """Seconds that an attempt of a shrunk job lasts before the job tries to grow back, if the cluster seems
    to have capacity or the operator cannot tell; 300 unless given. Doubles each time that capacity was lost
    again, up to a factor of 32. A job in a queue (queueName) does not grow by itself."""

    @property
    def shrink_after_s(self) -> int:
        return self.shrink_after_seconds or DEFAULT_SHRINK_AFTER_S

    @property
    def grow_after_s(self) -> int:
        return self.grow_after_seconds or DEFAULT_GROW_AFTER_S


class SizeReason(OpenEnum):
    """Reason why a job has another size than spec.workers."""

    CAPACITY = "Capacity"
    """The cluster had no capacity for more workers."""
    FAILURE = "Failure"
    """A rule of failurePolicy asked for it."""
    REFUSED = "Refused"
    """A size of spec.workers cannot keep the global batch, or does not fit the memory."""


class RefusedSize(ObservedModel):
    """Outcome for a spec.workers that cannot be used."""

    workers: Int
    """Size that the job keeps instead."""

    message: str = ""
    """Reason why it cannot be used, with the numbers."""


class ElasticStatus(ObservedModel):
    """Decisions of the operator about the job's size."""

    base_workers: Int
    """Size with which the job first started: the global batch is that of this size."""

    requested_workers: Int
    """Value of spec.workers that the other fields answer; another value starts a new decision."""

    workers: Int | None = None
    """Size of the next attempt if it is not spec.workers."""

    reason: SizeReason | None = None
    """Reason why it is not spec.workers."""

    message: str = ""
    """Explanation of the reason, for people."""

    since: AwareDatetime | None = None
    """Time of the decision."""

    refused: RefusedSize | None = None
    """Refusal of spec.workers, which stands while the job is smaller for another reason; under the reason
    Refused it is in `workers` and `message`."""

    failed_at: AwareDatetime | None = None
    """Time when a rule of failurePolicy last made the job smaller; it grows no sooner than
    failurePolicy.windowSeconds later."""

    ran: Int | None = None
    """Size of the last attempt whose ranks all met; a larger one that finds no nodes goes back to it."""

    losses: Int = 0
    """Number of times that capacity was lost since the job last ran at spec.workers for growAfterSeconds x
    2^losses."""

    @property
    def refusal(self) -> RefusedSize | None:
        """Refusal of the present spec.workers; None if it was accepted."""
        if self.reason is SizeReason.REFUSED and self.workers is not None:
            return RefusedSize(workers=self.workers, message=self.message)
        return self.refused

    @property
    def rule_at(self) -> datetime | None:
        """Time `failed_at`, also for a status that an earlier version wrote without it."""
        return self.failed_at or (self.since if self.reason is SizeReason.FAILURE else None)
