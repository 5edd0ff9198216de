"""Table of `reconcile` for a job whose first attempt was begun by an operator that ended before it wrote a
status.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    Row,
    Want,
    check,
    ended,
    job,
    pending,
    ready,
    running,
    seen,
)
from zerotrain.operator.reconcile import CreateWorkers, DeleteWorkers, PodView

pytestmark = pytest.mark.unit


def unwritten(
    *pods: PodView, id: str, want: Want, phase: str | None = None, generation: int = 1, **spec: Any
) -> Row:
    body = job(spec=spec, generation=generation)
    body.pop("status", None)
    if phase is not None:
        body["status"] = {"phase": phase}
    return Row(id=id, job=body, seen=seen(*pods), want=want)


ROWS = [
    unwritten(
        id="without pods it begins",
        want=Want(phase="Pending", attempt=1, actions=(CreateWorkers(attempt=1, indices=(0, 1)),)),
    ),
    unwritten(
        running(0),
        pending(1),
        id="its pods are the first attempt",
        want=Want(phase="Pending", attempt=1, fields={"restarts.total": 0}, actions=()),
    ),
    unwritten(
        running(1),
        id="only what is missing is made",
        want=Want(attempt=1, actions=(CreateWorkers(attempt=1, indices=(0,)),)),
    ),
    unwritten(
        ready(0),
        ready(1),
        id="a job that was suspended meanwhile yields",
        suspend=True,
        want=Want(phase="Suspending", attempt=1),
    ),
    unwritten(
        running(0),
        id="a pod that shows up after the job was called suspended does not stay",
        suspend=True,
        phase="Suspended",
        want=Want(phase="Suspending", attempt=1),
    ),
    unwritten(
        ended(0, 1),
        running(1),
        id="a failure meanwhile counts",
        want=Want(
            phase="Restarting",
            attempt=1,
            fields={"restarts.total": 1},
            actions=(DeleteWorkers(attempt=1, grace_s=1),),
        ),
    ),
    unwritten(
        ready(0),
        ready(1),
        id="a spec that was edited meanwhile may not be the one that they were made from",
        generation=4,
        want=Want(
            phase="Suspending",
            attempt=1,
            messages={"event": "the spec was changed while the job was briefly suspended"},
        ),
    ),
    unwritten(
        running(0, 2),
        id="pods of another attempt are nobody's beginning",
        want=Want(attempt=1),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_unrecorded(row: Row) -> None:
    check(row)
