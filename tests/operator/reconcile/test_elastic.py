"""Table of `reconcile` for elastic jobs: requested size, lost capacity, capacity regained, crashes in
between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    NOW,
    Row,
    Want,
    ago,
    check,
    ended,
    job,
    last_words,
    pending,
    progress,
    ready,
    run,
    running,
    seen,
    settled,
    stamp,
    status,
)
from zerotrain.operator.api import AttemptShape
from zerotrain.operator.reconcile import (
    Capacity,
    CreateWorkers,
    DeleteWorkers,
    Observed,
    Protection,
    ReadCapacity,
    RequestYield,
    UnprotectWorkers,
)

pytestmark = pytest.mark.unit


ELASTIC = {"minWorkers": 1, "maxWorkers": 8}
"""Bounds of the size. With one rank per worker and micro batch 1, a batch is meant for as many workers as it
has samples.
"""


def elastic(size: int, /, *, requested_workers: int = 4, base: int = 4, **state: Any) -> dict[str, Any]:
    """Return a job that runs with `size` workers; the user requests `requested_workers`, and the batch is
    that of `base`.
    """
    chosen = (
        {}
        if size == requested_workers
        else {"workers": size, "reason": "Capacity", "since": stamp(ago(9000))}
    )
    decided = {"baseWorkers": base, "requestedWorkers": requested_workers, **chosen, **state}
    stored = status("Running", shape={"workers": size}, elastic=decided, attemptStartTime=stamp(ago(9000)))
    stored["protectedAttempt"] = 1
    return job(spec={"elastic": ELASTIC, "workers": requested_workers}, status=stored)


def changed(row_job: dict[str, Any], spec: Mapping[str, Any] = {}, **stored: Any) -> dict[str, Any]:
    return {**row_job, "spec": {**row_job["spec"], **spec}, "status": {**row_job["status"], **stored}}


def team(size: int, **more: Any) -> Observed:
    """Return an observation of all workers ready and training."""
    pods = [ready(index) for index in range(size)]
    return seen(*pods, progress=progress(30), protection=PROTECTED, **more)


def capacity(fits: int | None, *, asked: int) -> Capacity:
    return Capacity(fits=fits, workers=asked, at=NOW)


NO_NODE = "Unschedulable: 0/4 nodes are available"
READ = ReadCapacity(shape=AttemptShape(workers=4))
PROTECTED = Protection(attempt=1, exists=True)
YIELD = RequestYield(attempt=1, pod="gpt-1-0", pod_ip="10.0.0.0")


def yielding(row_job: dict[str, Any], reason: str, **stored: Any) -> dict[str, Any]:
    """Return the same job, asked to yield ten seconds ago."""
    asked = stamp(ago(10))
    request = {"reason": reason, "requestedAt": asked, "joined": True}
    return changed(
        row_job, phase="Yielding", yieldRequest=request, checkpoint={"requestedAt": asked}, **stored
    )


WISHES = [
    Row(
        id="scaled down: all ranks are asked to yield, and the wish is stored with the request",
        job=changed(elastic(4), {"workers": 2}),
        seen=team(4),
        want=Want(
            phase="Yielding",
            attempt=1,
            actions=(YIELD,),
            events=("Resizing",),
            fields={"yieldRequest.reason": "Resize", "elastic.requestedWorkers": 2, "elastic.baseWorkers": 4},
            messages={"event": "resizing from 4 to 2 workers"},
        ),
    ),
    Row(
        id="all yielded: the next attempt has the new size and costs no budget",
        job=yielding(elastic(2, requested_workers=2), "Resize", shape={"workers": 4}),
        seen=seen(gone=tuple(ended(index, 75, termination=last_words(75, step=31)) for index in range(4))),
        want=Want(
            phase="Pending",
            attempt=2,
            actions=(CreateWorkers(attempt=2, indices=(0, 1)), UnprotectWorkers(attempt=1)),
            fields={"shape.workers": 2, "restarts.total": 0, "yieldRequest": None, "workers.desired": 2},
        ),
    ),
    Row(
        id="a configuration that names all three sizes is judged at the size that it was written for",
        job=changed(
            yielding(elastic(2, requested_workers=2), "Resize", shape={"workers": 4}),
            {
                "config": {
                    "train_batch_size": 4,
                    "train_micro_batch_size_per_gpu": 1,
                    "gradient_accumulation_steps": 1,
                }
            },
        ),
        seen=seen(gone=tuple(ended(index, 75) for index in range(4))),
        want=Want(phase="Pending", attempt=2, fields={"shape.workers": 2}),
    ),
    Row(
        id="another wish while the ranks yield: one resize, to the newest size",
        job=changed(
            yielding(elastic(2, requested_workers=2), "Resize", shape={"workers": 4}), {"workers": 1}
        ),
        seen=seen(gone=tuple(ended(index, 75) for index in range(4))),
        want=Want(
            phase="Pending",
            attempt=2,
            actions=(CreateWorkers(attempt=2, indices=(0,)), UnprotectWorkers(attempt=1)),
        ),
    ),
    Row(
        id="another wish while the new attempt starts: it is left alone until it trains",
        job=changed(elastic(2, requested_workers=2), {"workers": 1}, phase="Starting", shape={"workers": 2}),
        seen=seen(ready(0), replace(pending(1), scheduled=True)),
        want=Want(phase="Pending", attempt=1, events=(), fields={"elastic.requestedWorkers": 1}),
    ),
    Row(
        id="another wish before the first step: not yet",
        job=changed(elastic(4), {"workers": 2}, attemptStartTime=stamp(ago(20))),
        seen=seen(*(ready(index) for index in range(4))),
        want=Want(phase="Running", actions=(), wake_in_s=40),
    ),
    Row(
        id="a size that cannot keep the global batch is refused with the numbers; the job goes on",
        job=changed(elastic(4), {"workers": 3}),
        seen=team(4),
        want=Want(
            phase="Running",
            events=("ResizeRefused",),
            fields={"elastic.requestedWorkers": 3, "elastic.workers": 4, "elastic.reason": "Refused"},
            messages={"event": "1, 2, 4."},
        ),
    ),
    Row(
        id="the refused size does not stall a restart either",
        job=changed(
            elastic(4, requested_workers=3, workers=4, reason="Refused"),
            phase="Restarting",
            nextAttemptTime=None,
        ),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, fields={"shape.workers": 4}),
    ),
    Row(
        id="scaled up where there is room",
        job=changed(elastic(2, requested_workers=2), {"workers": 4}),
        seen=team(2, capacity=capacity(4, asked=4)),
        want=Want(phase="Yielding", events=("Resizing",), fields={"elastic.workers": None}),
    ),
    Row(
        id="scaled up: whether there is room is asked first",
        job=changed(elastic(2, requested_workers=2), {"workers": 4}),
        seen=team(2),
        want=Want(
            phase="Running",
            events=(),
            actions=(ReadCapacity(shape=AttemptShape(workers=4)),),
            fields={"elastic.requestedWorkers": 4},
        ),
    ),
    Row(
        id="scaled up where nobody can tell: it is tried",
        job=changed(elastic(2, requested_workers=2), {"workers": 4}),
        seen=team(2, capacity=capacity(None, asked=4)),
        want=Want(phase="Yielding", events=("Resizing",), fields={"elastic.workers": None}),
    ),
    Row(
        id="scaled up to more than there is room for: as far as it goes",
        job=changed(elastic(2, requested_workers=2, base=8), {"workers": 8}),
        seen=team(2, capacity=capacity(5, asked=8)),
        want=Want(phase="Yielding", fields={"elastic.workers": 4, "elastic.reason": "Capacity"}),
    ),
    Row(
        id="scaled up without any room: the training goes on and waits for room",
        job=changed(elastic(2, requested_workers=2), {"workers": 4}),
        seen=team(2, capacity=capacity(2, asked=4)),
        want=Want(phase="Running", events=(), fields={"elastic.workers": 2, "elastic.reason": "Capacity"}),
    ),
    Row(
        id="suspended while the ranks yield for a resize: suspended, in the new size afterwards",
        job=changed(
            yielding(elastic(2, requested_workers=2), "Resize", shape={"workers": 4}), {"suspend": True}
        ),
        seen=seen(gone=tuple(ended(index, 75) for index in range(4))),
        want=Want(
            phase="Suspended",
            attempt=1,
            actions=(UnprotectWorkers(attempt=1),),
            fields={"elastic.requestedWorkers": 2},
        ),
    ),
]


def starting(size: int, *, s_ago: float, **more: Any) -> dict[str, Any]:
    began: dict[str, Any] = {"attemptStartTime": stamp(ago(s_ago)), "progress": {"step": 30}}
    began["protectedAttempt"] = None
    return changed(elastic(size, **more), phase="Pending", **began)


def placed(count: int, size: int, **more: Any) -> Observed:
    """Return an observation in which `count` of the pods have a node."""
    homeless: dict[str, Any] = {"unscheduled_reason": NO_NODE, "refused_seen_at": ago(60)}
    pods = [
        pending(index, scheduled=True) if index < count else pending(index, **homeless)
        for index in range(size)
    ]
    return seen(*pods, **more)


def three_of_four(**more: Any) -> Observed:
    """Return an observation of three running programs that wait for the fourth, which has no node."""
    last = pending(3, unscheduled_reason=NO_NODE, refused_seen_at=ago(60))
    return seen(*(running(index) for index in range(3)), last, **more)


LOST_CAPACITY = [
    Row(
        id="pods without a node: time is given",
        job=starting(4, s_ago=100),
        seen=placed(3, 4),
        want=Want(phase="Pending", actions=(), wake_in_s=20),
    ),
    Row(
        id="no room for all in time: the job goes on with what works, and nobody is asked to checkpoint",
        job=starting(4, s_ago=120),
        seen=placed(3, 4, capacity=capacity(3, asked=4)),
        want=Want(
            phase="Yielding",
            events=("Resizing",),
            actions=(DeleteWorkers(attempt=1, grace_s=1),),
            fields={
                "elastic.workers": 2,
                "elastic.reason": "Capacity",
                "elastic.message": "capacity for 3 of 4 workers",
                "elastic.losses": 1,
                "yieldRequest.joined": False,
            },
        ),
    ),
    Row(
        id="no pod has a node: one size smaller",
        job=starting(4, s_ago=151),
        seen=placed(0, 4),
        want=Want(phase="Yielding", fields={"elastic.workers": 2}),
    ),
    Row(
        id="a deadline for the start leaves time for fewer workers to be decided on",
        job=changed(starting(4, s_ago=120), {"runPolicy": {"startDeadlineSeconds": 60}}),
        seen=three_of_four(capacity=capacity(3, asked=4)),
        want=Want(phase="Yielding", events=("Resizing",), fields={"elastic.workers": 2}),
    ),
    Row(
        id="a deadline for the start counts as it is where a worker has a node and does not start",
        job=changed(starting(4, s_ago=61), {"runPolicy": {"startDeadlineSeconds": 60}}),
        seen=placed(4, 4),
        want=Want(phase="Restarting", events=("StartDeadlineExceeded",)),
    ),
    Row(
        id="not below minWorkers: it waits",
        job=changed(starting(4, s_ago=500), {"elastic": {"minWorkers": 4, "maxWorkers": 8}}),
        seen=placed(2, 4, capacity=capacity(2, asked=4)),
        want=Want(phase="Pending", events=(), fields={"elastic.workers": None}),
    ),
    Row(
        id="the patience is the user's",
        job=changed(starting(4, s_ago=30), {"elastic": {**ELASTIC, "shrinkAfterSeconds": 20}}),
        seen=placed(2, 4, capacity=capacity(2, asked=4)),
        want=Want(phase="Yielding", fields={"elastic.workers": 2}),
    ),
    Row(
        id="pods that have nodes and pull their image are no lack of room",
        job=starting(4, s_ago=500),
        seen=placed(4, 4),
        want=Want(phase="Pending", events=()),
    ),
    Row(
        id="a job of fixed size waits",
        job=job(status=status("Pending", attemptStartTime=stamp(ago(9000)))),
        seen=placed(1, 2),
        want=Want(phase="Pending", events=(), fields={"elastic": None}),
    ),
    Row(
        id="the pods of the attempt that never ran are gone: the smaller one starts",
        job=changed(
            starting(2, s_ago=130, requested_workers=4),
            phase="Yielding",
            shape={"workers": 4},
            yieldRequest={"reason": "Resize", "requestedAt": stamp(ago(2)), "joined": False},
            podsCreated=True,
        ),
        seen=seen(),
        want=Want(
            phase="Pending",
            attempt=2,
            actions=(CreateWorkers(attempt=2, indices=(0, 1)),),
            fields={"failures.0": None, "restarts.total": 0},
        ),
    ),
]

RAISED = {"elastic": {"minWorkers": 4, "maxWorkers": 8}}
"""Bounds above the size that the job was shrunk to."""
GROWTH = [
    Row(
        id="minWorkers raised above the size that runs: it is given up once there is room for more",
        job=changed(elastic(2, losses=1), RAISED),
        seen=team(2, capacity=capacity(2, asked=4)),
        want=Want(
            phase="Running", actions=(), fields={"elastic.since": stamp(ago(9000)), "elastic.losses": 1}
        ),
    ),
    Row(
        id="minWorkers raised: the next attempt keeps to it",
        job=changed(elastic(2, losses=1), RAISED, phase="Restarting"),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, fields={"shape.workers": 4}),
    ),
    Row(
        id="long enough in the smaller size: whether there is room is read first",
        job=elastic(2, losses=1),
        seen=team(2),
        want=Want(phase="Running", actions=(READ,), events=()),
    ),
    Row(
        id="there is room: back to the wish",
        job=elastic(2, losses=1),
        seen=team(2, capacity=capacity(4, asked=4)),
        want=Want(
            phase="Yielding",
            events=("Resizing",),
            fields={"elastic.workers": None, "elastic.losses": 1},
        ),
    ),
    Row(
        id="nobody can tell: it is tried",
        job=elastic(2, losses=1),
        seen=team(2, capacity=capacity(None, asked=4)),
        want=Want(
            phase="Yielding",
            events=("Resizing",),
            fields={"elastic.workers": None},
            messages={"event": "there may be capacity for 4 workers"},
        ),
    ),
    Row(
        id="no room: it is read again after a while",
        job=elastic(2, losses=1),
        seen=team(2, capacity=capacity(3, asked=4)),
        want=Want(phase="Running", actions=(), events=(), wake_in_s=300),
    ),
    Row(
        id="a reading that is old is made anew",
        job=elastic(2, losses=1),
        seen=team(2, capacity=replace(capacity(4, asked=4), at=ago(300))),
        want=Want(phase="Running", actions=(READ,), events=()),
    ),
    Row(
        id="so is one for another size",
        job=elastic(2, losses=1),
        seen=team(2, capacity=capacity(8, asked=8)),
        want=Want(phase="Running", actions=(READ,), events=()),
    ),
    Row(
        id="nodes that the job avoids node are no room",
        job=changed(elastic(2), excludedNodes=[{"name": "n1", "until": stamp(ago(-40)), "reason": "x"}]),
        seen=team(2),
        want=Want(
            phase="Running",
            actions=(ReadCapacity(shape=AttemptShape(workers=4, excluded_nodes=("n1",))),),
        ),
    ),
    Row(
        id="a young attempt is not stopped again, and nothing is read for it",
        job=changed(elastic(2), attemptStartTime=stamp(ago(200))),
        seen=team(2, capacity=capacity(4, asked=4)),
        want=Want(phase="Running", actions=(), wake_in_s=100),
    ),
    Row(
        id="after room was lost three times the attempt must last four times as long",
        job=changed(elastic(2, losses=3), attemptStartTime=stamp(ago(300))),
        seen=team(2, capacity=capacity(4, asked=4)),
        want=Want(phase="Running", actions=(), wake_in_s=900),
    ),
    Row(
        id="capacity for a part of it is taken as well",
        job=elastic(2, requested_workers=8, base=8),
        seen=team(2, capacity=capacity(7, asked=8)),
        want=Want(phase="Yielding", fields={"elastic.workers": 4, "elastic.reason": "Capacity"}),
    ),
    Row(
        id="a refused wish is no reason to grow",
        job=elastic(2, requested_workers=3, workers=2, reason="Refused"),
        seen=team(2),
        want=Want(phase="Running", events=(), actions=()),
    ),
    Row(
        id="back at the wish and training: earlier losses are forgotten",
        job=elastic(4, losses=2),
        seen=team(4),
        want=Want(phase="Running", fields={"elastic.losses": 0}),
    ),
    Row(
        id="the size that ran is known from then on",
        job=changed(elastic(2), phase="Starting"),
        seen=team(2),
        want=Want(phase="Running", fields={"elastic.ran": 2}),
    ),
    Row(
        id="a larger attempt that does not run goes back to the size that ran",
        job=changed(starting(8, s_ago=120, requested_workers=8, base=8, ran=2), shape={"workers": 8}),
        seen=placed(6, 8),
        want=Want(
            phase="Yielding", fields={"elastic.workers": 2, "elastic.reason": "Capacity", "elastic.losses": 1}
        ),
    ),
    Row(
        id="where there is no room for that any more: the next size that works",
        job=starting(4, s_ago=120, ran=4),
        seen=placed(3, 4),
        want=Want(phase="Yielding", fields={"elastic.workers": 2}),
    ),
]


@pytest.mark.parametrize("row", WISHES, ids=lambda row: row.id)
def test_requested_workers(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", LOST_CAPACITY, ids=lambda row: row.id)
def test_lost_capacity(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", GROWTH, ids=lambda row: row.id)
def test_growth(row: Row) -> None:
    check(row)


def test_the_first_attempt_sets_the_base_workers() -> None:
    _, after = run(Row(id="", job=job(spec={"elastic": ELASTIC, "workers": 4}), seen=seen(), want=Want()))
    assert after["elastic"] == {"baseWorkers": 4, "requestedWorkers": 4, "message": "", "losses": 0}
    assert after["shape"]["workers"] == 4


def test_what_was_decided_is_not_written_again() -> None:
    for row in (*WISHES, *LOST_CAPACITY, *GROWTH):
        observed = row.seen
        again = settled(settled(row.job, observed), observed)
        plan, _ = run(Row(id="", job=again, seen=observed, want=Want(), now=NOW + timedelta(seconds=0)))
        assert plan.status is None, row.id
