"""When a job whose step stopped moving counts as hung, and which rank is too slow: policy and status."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .base import ApiModel, Int, ObservedModel, Seconds


class HangAction(StrEnum):
    RESTART = "Restart"
    REPORT = "Report"


class HangPolicy(ApiModel):
    """When a job whose step stopped moving counts as hung, and what follows. Ranks of a program that never
    reports are not judged. May be changed at any time."""

    step_timeout_factor: Annotated[Int, Field(ge=2, le=1000)] | None = None
    """Hung after this many times what a step usually takes (the 99th percentile of the attempt's last
    steps), 2 to 1000; 10 unless given. Twice the longest step of the attempt is never a hang. Mutable."""

    min_timeout_seconds: Seconds | None = None
    """Never hung before so many seconds without a step, 1 to 31536000; 300 unless given. Mutable."""

    startup_timeout_seconds: Seconds | None = None
    """Seconds that a rank may spend in one part of its start: imports and model, the rendezvous, loading a
    checkpoint; 1 to 31536000, 1800 unless given. Mutable."""

    first_step_timeout_seconds: Seconds | None = None
    """Seconds that the first step of an attempt may take, 1 to 31536000; startupTimeoutSeconds unless given.
    The ten steps after it may take as long, or stepTimeoutFactor times the first one where that is less.
    Mutable."""

    checkpoint_timeout_seconds: Seconds | None = None
    """Seconds that a checkpoint may take, 1 to 31536000; 1800 unless given, and never less than
    stepTimeoutFactor times the longest one of the attempt. Mutable."""

    action: HangAction | None = None
    """Restart collects the stacks of all ranks and starts another attempt, as failurePolicy says for the
    reason Hang; Report collects the stacks and leaves the attempt alone. Restart unless given. Mutable."""

    straggler_percent: Annotated[Int, Field(ge=110, le=10_000)] | None = None
    """A rank is reported as a straggler when its own work in a step takes so many percent of what it takes
    the middle one of all ranks, 110 to 10000; 150 unless given. Mutable."""


class HangStatus(ObservedModel):
    """The hang that was found in the current attempt."""

    attempt: Int
    """Attempt that it was found in."""

    detected_at: datetime
    """When the operator was sure of it."""

    step: Int = 0
    """Step that did not come to its end."""

    phase: str = ""
    """What the accused rank was doing: init, first_step, step, checkpoint and so on."""

    limit_seconds: Int = 0
    """Limit that was exceeded."""

    rank: Int | None = None
    """Rank that holds up the others, where one stands out."""

    worker: Int | None = None
    """Index of the worker of that rank; absent where no rank stands out."""

    pod: str = ""
    """Pod of that rank."""

    node: str = ""
    """Node of the pod."""

    message: str = ""
    """Why this rank is accused."""

    stacks: str = ""
    """ConfigMap with the stacks of the ranks; empty while or when there are none."""


class StragglerStatus(ObservedModel):
    """The rank whose own work takes longest, while it is too slow."""

    attempt: Int
    """Attempt that it was found in."""

    rank: Int
    """The slow rank."""

    pod: str = ""
    """Pod of the rank."""

    node: str = ""
    """Node of the pod."""

    percent: Int = 0
    """What its own work in a step takes, in percent of the middle one of all ranks, when it was found."""
