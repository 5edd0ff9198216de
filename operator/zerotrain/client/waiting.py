"""Waiting for a job: its changes from a watch, and the conditions that they are compared with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zerotrain.client.errors import (
    InvalidJobError,
    JobFailedError,
    JobNotFoundError,
    WaitTimeoutError,
)
from zerotrain.client.job import Job, command
from zerotrain.client.lenient_json import Fields
from zerotrain.client.transport import Transport
from zerotrain.client.watching import Watched
from zerotrain.contract.text import one_line

PATIENCE_S = 120.0
"""Seconds of an unavailable API server that a wait outlives."""

GOALS = ("complete", "failed", "finished", "running", "suspended", "deleted", "step=N", "TYPE[=STATUS]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """Condition to wait for."""

    holds: Callable[[Job], bool]
    survives_stalling: bool = False
    """Whether to keep waiting for a correction of the spec once the job is stalled."""
    is_deletion: bool = False
    """Whether the wait is for the job's deletion, which may still come once the job has ended."""


def parse_goal(text: str) -> Goal:
    """Parse one of GOALS. Raises InvalidJobError."""
    name, _, value = text.partition("=")
    match name.lower():
        case "complete" | "completed" if not value:
            return Goal(holds=lambda job: job.phase == "Completed")
        case "failed" if not value:
            return Goal(holds=lambda job: job.phase == "Failed")
        case "finished" if not value:
            return Goal(holds=lambda job: job.is_finished)
        case "running" if not value:
            return Goal(holds=lambda job: job.phase == "Running")
        case "suspended" if not value:
            return Goal(holds=lambda job: job.phase == "Suspended")
        case "deleted" if not value:
            return Goal(holds=lambda job: False, survives_stalling=True, is_deletion=True)
        case "step" if value.isascii() and value.isdigit():
            return Goal(holds=lambda job: job.step >= int(value))
    if name[:1].isupper() and value in ("", "True", "False", "Unknown"):
        return Goal(holds=lambda job: _status_of(job, name) == (value or "True"), survives_stalling=True)
    raise InvalidJobError(f"cannot wait for {text!r}", next_step=f"wait for one of: {', '.join(GOALS)}")


def _status_of(job: Job, kind: str) -> str:
    found = job.condition(kind)
    return found.status if found is not None else ""


def wait_for(states: Iterator[Job | None], name: str, *, until: str, timeout_s: float | None) -> Job:
    """Return the first state in which the goal holds. Raises InvalidJobError, JobNotFoundError,
    JobFailedError, WaitTimeoutError."""
    goal, last = parse_goal(until), None
    for job in states:
        if job is None:
            if goal.is_deletion and last is not None:
                return last
            raise JobNotFoundError(f"job {name} was deleted while it was waited for")
        last = job
        if goal.holds(job):
            return job
        survives = {
            "Failed": goal.is_deletion,
            "Completed": goal.is_deletion,
            "Stalled": goal.survives_stalling or not _is_seen(job),
        }
        if not survives.get(job.phase, True):
            raise JobFailedError(_ended(job, until), next_step=command(job, "describe"))
    where = f"it is {last.phase or 'new'} at step {last.step}" if last is not None else "it was not seen"
    waited = f" within {timeout_s:g} s" if timeout_s is not None else ""
    raise WaitTimeoutError(
        f"job {name} did not become {until}{waited}; {where}",
        next_step=command(last, "describe") if last is not None else None,
    )


def _is_seen(job: Job) -> bool:
    """Return whether the operator has observed the present spec; a correction takes a moment."""
    generation = Fields(job.raw).part("metadata").whole("generation") or 0
    return generation <= job.status.observed_generation


def _ended(job: Job, until: str) -> str:
    failed = job.condition("Stalled" if job.phase == "Stalled" else "Failed")
    why = f": {failed.reason}: {one_line(failed.message, 500)}" if failed and failed.is_true else ""
    return f"job {job.name} is {job.phase}, not {until}{why}"


def changes(transport: Transport, path: str, name: str, *, timeout_s: float | None) -> Iterator[Job | None]:
    """Iterate over the job's states: now and after every change, until the time is over; None at the end once
    it is deleted."""
    deadline = time.monotonic() + timeout_s if timeout_s is not None else math.inf
    query = {"fieldSelector": f"metadata.name={name}"}
    watched = Watched(transport, path, query, what=f"job {name}", patience_s=PATIENCE_S)
    for number, batch in enumerate(watched.batches(deadline)):
        if number == 0 and not batch:
            yield None
            return
        for raw in batch.values():
            yield Job.of(raw) if raw is not None else None
            if raw is None:
                return
