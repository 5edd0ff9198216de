"""Between which sizes a job may be resized, and what the operator decided about its size."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from zerotrain.operator.constants import MAX_WORKERS

from .base import ApiModel, Int, ObservedModel, Seconds, rule

DEFAULT_SHRINK_AFTER_S = 120
DEFAULT_GROW_AFTER_S = 300


class Elastic(ApiModel):
    """Between which numbers of workers the job may be resized. A resize is a checkpoint and a new attempt;
    the global batch stays what it is at the size that the job first started with, and
    gradient_accumulation_steps follows the number of ranks. Its parts may be changed at any time; it is
    given or removed only while the job is suspended."""

    RULES = (
        rule(
            "self.minWorkers <= self.maxWorkers",
            "minWorkers must not exceed maxWorkers",
            holds=lambda self: self.min_workers <= self.max_workers,
            field_path=".minWorkers",
        ),
    )

    min_workers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)]
    """The fewest workers that the job goes on with, 1 to 10000."""

    max_workers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)]
    """The most workers that spec.workers (kubectl scale) may ask for, 1 to 10000."""

    shrink_after_seconds: Seconds | None = None
    """An attempt goes on with fewer workers when nodes, or a quota, for all of them were missing for so many
    seconds; 120 unless given. A turn in a queue does not count."""

    grow_after_seconds: Seconds | None = None
    """A job that was shrunk tries to grow back when its attempt has lasted for so many seconds and the
    cluster seems to have room, or nobody can tell; 300 unless given. Doubles, up to 32 times, with each time
    that room was lost again. A job in a queue (queueName) does not grow by itself."""

    @property
    def shrink_after_s(self) -> int:
        return self.shrink_after_seconds or DEFAULT_SHRINK_AFTER_S

    @property
    def grow_after_s(self) -> int:
        return self.grow_after_seconds or DEFAULT_GROW_AFTER_S


class SizeReason(StrEnum):
    """Why a job has another size than spec.workers."""

    CAPACITY = "Capacity"
    """There was no room for more."""
    FAILURE = "Failure"
    """A rule of failurePolicy asked for it."""
    REFUSED = "Refused"
    """spec.workers is a size that cannot keep the global batch, or that does not fit the memory."""


class RefusedWish(ObservedModel):
    """What became of a spec.workers that cannot be."""

    workers: Int
    """Size that the job keeps in its place."""

    message: str = ""
    """Why it cannot be, with the numbers."""


class ElasticStatus(ObservedModel):
    """What the operator decided about the job's size."""

    base_workers: Int
    """Size that the job first started with: the global batch is that of this size."""

    wish: Int
    """The spec.workers that the rest answers; another one begins anew."""

    workers: Int | None = None
    """Size of the next attempt where it is not spec.workers."""

    reason: SizeReason | None = None
    """Why it is not spec.workers."""

    message: str = ""
    """The same for people."""

    since: datetime | None = None
    """When it was decided."""

    refused: RefusedWish | None = None
    """The refusal of spec.workers, which stands while the job is smaller for another reason; under the reason
    Refused it is `workers` and `message`."""

    failed_at: datetime | None = None
    """When a rule of failurePolicy last made the job smaller; it grows no sooner than
    failurePolicy.windowSeconds later."""

    ran: Int | None = None
    """Size of the last attempt whose ranks all met; a larger one that finds no nodes goes back to it."""

    losses: Int = 0
    """Times that room was lost since the job last ran at spec.workers for growAfterSeconds x 2^losses."""

    @property
    def refusal(self) -> RefusedWish | None:
        """Of the present wish; None where that was taken."""
        if self.reason is SizeReason.REFUSED and self.workers is not None:
            return RefusedWish(workers=self.workers, message=self.message)
        return self.refused

    @property
    def rule_at(self) -> datetime | None:
        """`failed_at`, also where an earlier version wrote the status, which did not keep it."""
        return self.failed_at or (self.since if self.reason is SizeReason.FAILURE else None)
