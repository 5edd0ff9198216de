"""Table of `reconcile` for elastic jobs whose users request a size that the memory cannot hold: no attempt
stops for it.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile import test_memory as memory
from tests.operator.reconcile.test_memory import LARGE
from tests.operator.reconcile.test_queues import KUEUE, RUNNING
from tests.operator.reconcile_builders import Row, Want, ago, check, job, progress, ready, seen, stamp, status
from zerotrain.operator.reconcile import CreateWorkers, Observed, Protection

pytestmark = pytest.mark.unit


CONFIG: dict[str, Any] = {**memory.CONFIG, "activation_checkpointing": {}}
SPEC: dict[str, Any] = {
    **LARGE,
    "config": CONFIG,
    "elastic": {"minWorkers": 1, "maxWorkers": 64},
}
"""Spec that fits on 16 workers, is tight on 8, and does not fit on 4: each rank then holds more of the
model.
"""

IGNORE: dict[str, Any] = memory.IGNORE
NUMBERS = "4 workers: each GPU needs 131.0 GiB of GPU memory"
REFUSED = {"workers": 16, "reason": "Refused", "message": "4 workers: ...", "since": stamp(ago(9000))}


def sized(
    requested_workers: int, phase: str = "Running", *, spec: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Return a job that has 16 workers, and whose user now requests `requested_workers`."""
    state = {"baseWorkers": 16, "requestedWorkers": more.pop("answered", 16), **more.pop("state", {})}
    stored = status(phase, shape={"workers": 16}, elastic=state, attemptStartTime=stamp(ago(9000)))
    return job(spec={**SPEC, **(spec or {}), "workers": requested_workers}, status=stored, **more)


def team(**more: Any) -> Observed:
    pods = [ready(index) for index in range(16)]
    return seen(*pods, progress=progress(30), protection=Protection(attempt=1, exists=True), **more)


KEPT = {
    "elastic.requestedWorkers": 4,
    "elastic.workers": 16,
    "elastic.reason": "Refused",
    "yieldRequest": None,
}
ROWS = [
    Row(
        id="refused with the numbers before anybody stops",
        job=sized(4),
        seen=team(),
        want=Want(
            phase="Running",
            attempt=1,
            events=("ResizeRefused",),
            conditions={"Admitted": ("True", "ResizeRefused"), "Ready": ("True", "AllRanksJoined")},
            messages={"event": NUMBERS, "Admitted": "The job keeps 16 workers."},
            fields=KEPT,
        ),
    ),
    Row(
        id="and in a queue, whose admission is kept",
        job=sized(4, spec={"scheduling": {"queueName": "team-a"}}),
        seen=team(apis=KUEUE, queue=RUNNING),
        want=Want(phase="Running", events=("ResizeRefused",), fields=KEPT),
    ),
    Row(
        id="a tight size is taken",
        job=sized(8),
        seen=team(),
        want=Want(phase="Yielding", events=("Resizing",), conditions={"Admitted": ("True", "SpecAccepted")}),
    ),
    Row(
        id="the annotation takes it",
        job=sized(4, **IGNORE),
        seen=team(),
        want=Want(phase="Yielding", events=("Resizing",)),
    ),
    Row(
        id="the annotation comes after the refusal",
        job=sized(4, answered=4, state=REFUSED, **IGNORE),
        seen=team(),
        want=Want(phase="Yielding", events=("Resizing",), fields={"elastic.workers": None}),
    ),
    Row(
        id="the annotation does not make a batch divide",
        job=sized(3, answered=3, state=REFUSED, **IGNORE),
        seen=team(),
        want=Want(phase="Running", events=(), fields={"elastic.workers": 16}),
    ),
    Row(
        id="told once",
        job=sized(4, answered=4, state=REFUSED),
        seen=team(),
        want=Want(phase="Running", events=(), conditions={"Admitted": ("True", "ResizeRefused")}),
    ),
    Row(
        id="another wish lifts it",
        job=sized(16, answered=4, state=REFUSED),
        seen=team(),
        want=Want(phase="Running", events=(), conditions={"Admitted": ("True", "SpecAccepted")}),
    ),
    Row(
        id="a restart keeps the size",
        job=sized(4, "Restarting", answered=4, state=REFUSED),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, actions=(CreateWorkers(attempt=2, indices=tuple(range(16))),)),
    ),
    Row(
        id="asked for between two attempts: the size stays, nothing stalls",
        job=sized(4, "Restarting"),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, events=("ResizeRefused",), fields={"shape.workers": 16}),
    ),
    Row(
        id="a configuration that fits was given while it was suspended",
        job=sized(
            4,
            "Suspended",
            answered=4,
            state=REFUSED,
            spec={
                "config": {
                    **CONFIG,
                    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
                }
            },
        ),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, fields={"shape.workers": 4, "elastic.reason": None}),
    ),
    Row(
        id="resumed as it was: the refusal stands",
        job=sized(4, "Suspended", answered=4, state=REFUSED),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, fields={"shape.workers": 16, "elastic.reason": "Refused"}),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row(row: Row) -> None:
    check(row)
