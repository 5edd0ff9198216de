"""Hung jobs and slow ranks: policy and status."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AwareDatetime, Field

from .base import ApiModel, Int, ObservedModel, Seconds


class HangAction(StrEnum):
    RESTART = "Restart"
    REPORT = "Report"


class HangPolicy(ApiModel):
    """Limits after which a job whose step no longer advances counts as hung, and what follows. Ranks of a
    program that never reports are not judged. May be changed at any time."""

    step_timeout_factor: Annotated[Int, Field(ge=2, le=1000)] | None = None
    """Factor on the usual duration of a step (the 99th percentile of the attempt's last steps) after which
    the job is hung, 2 to 1000; 10 unless given. Twice the longest step of the attempt is never a hang.
    Mutable."""

    min_timeout_seconds: Seconds | None = None
    """Seconds without a step before which the job is never hung, 1 to 31536000; 300 unless given. Mutable."""

    startup_timeout_seconds: Seconds | None = None
    """Seconds that a rank may spend in one part of its start: imports and model, the rendezvous, loading a
    checkpoint; 1 to 31536000, 1800 unless given. Mutable."""

    first_step_timeout_seconds: Seconds | None = None
    """Seconds that the first step of an attempt may take, 1 to 31536000; startupTimeoutSeconds unless given.
    The ten steps after it may take as long, or stepTimeoutFactor times the first one if that is less.
    Mutable."""

    checkpoint_timeout_seconds: Seconds | None = None
    """Seconds that a checkpoint may take, 1 to 31536000; 1800 unless given, and never less than
    stepTimeoutFactor times the longest one of the attempt. Mutable."""

    action: HangAction | None = None
    """Action after a hang. Restart collects the stacks of all ranks and starts another attempt, as
    failurePolicy says for the reason Hang; Report collects the stacks and leaves the attempt alone. Restart
    unless given. Mutable."""

    straggler_percent: Annotated[Int, Field(ge=110, le=10_000)] | None = None
    """Percentage above which a rank is reported as a straggler: the time of its own work in a step, relative
    to that of the median rank, 110 to 10000; 150 unless given. Mutable."""


class HangStatus(ObservedModel):
    """Hang that was found in the current attempt."""

    attempt: Int
    """Attempt in which it was found."""

    detected_at: AwareDatetime
    """Time when the operator was sure of it."""

    step: Int = 0
    """Step that did not complete."""

    phase: str = ""
    """Phase of the suspected rank: init, first_step, step, checkpoint and so on."""

    limit_seconds: Int = 0
    """Limit that was exceeded, in seconds."""

    rank: Int | None = None
    """Rank that blocks the others, if one stands out."""

    worker: Int | None = None
    """Index of the worker of that rank; absent if no rank stands out."""

    pod: str = ""
    """Pod of that rank."""

    node: str = ""
    """Node of the pod."""

    message: str = ""
    """Reason why this rank is suspected."""

    stacks: str = ""
    """ConfigMap with the stacks of the ranks; empty if there are none, or none yet."""


class StragglerStatus(ObservedModel):
    """Slowest rank by its own work, while it is too slow."""

    attempt: Int
    """Attempt in which it was found."""

    rank: Int
    """Rank that is too slow."""

    pod: str = ""
    """Pod of the rank."""

    node: str = ""
    """Node of the pod."""

    percent: Int = 0
    """Time of its own work in a step, in percent of the median rank's, when it was found."""
