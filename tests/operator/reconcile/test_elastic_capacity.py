"""Causes that change the size of an elastic job: a quota and the scheduler, not a slot in a queue, and no
size whose workers could not hold the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.operator.reconcile.test_elastic import (
    capacity,
    changed,
    elastic,
    placed,
    starting,
    team,
    yielding,
)
from tests.operator.reconcile_builders import (
    Row,
    Want,
    ago,
    check,
    ended,
    job,
    pending,
    progress,
    ready,
    run,
    seen,
    stamp,
    status,
)
from zerotrain.operator.constants import ANNOTATION_IGNORE_MEMORY_PLAN
from zerotrain.operator.reconcile import DeleteWorkers, Problem
from zerotrain.operator.reconcile.observe import ClusterApis, QueueView

pytestmark = pytest.mark.unit


APIS = ClusterApis(at=ago(5), kueue="kueue.x-k8s.io/v1beta2")
QUEUE = {"scheduling": {"queueName": "team-a"}}
WAITS_IN_QUEUE = QueueView(exists=True, workers=4, queue="team-a", message="insufficient quota")
LET_IN = QueueView(exists=True, workers=2, queue="team-a", admitted=True, holds_quota=True, pods_ready=True)


def waiting(spec: Mapping[str, Any], **state: Any) -> dict[str, Any]:
    """Return the job in phase Queued."""
    body = changed(elastic(4, **state), spec, phase="Queued", startTime=None)
    return changed(body, protectedAttempt=None)


STAYS: dict[str, Any] = {"elastic.workers": None, "elastic.losses": 0}
RESUMED = [
    Row(
        id="a turn in a queue is no lack of nodes: the Workload stays",
        job=waiting(QUEUE),
        seen=seen(apis=APIS, queue=WAITS_IN_QUEUE),
        want=Want(phase="Queued", actions=(), events=(), fields=STAYS),
    ),
    Row(
        id="without pod groups nobody knows of room",
        job=waiting({"scheduling": {"gang": "Volcano"}}),
        seen=seen(apis=APIS),
        want=Want(phase="Queued", events=(), fields=STAYS),
    ),
    Row(
        id="resumed: how much room there was is long ago",
        job=changed(elastic(2), phase="Suspended"),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, fields={"shape.workers": 4, "elastic.workers": None}),
    ),
    Row(
        id="resumed: what failed in that size may have been changed meanwhile",
        job=changed(elastic(2, reason="Failure"), phase="Suspended"),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, fields={"shape.workers": 4, "elastic.workers": None}),
    ),
]

IN_QUEUE = [
    Row(
        id="free nodes are no quota: an admitted job does not grow by itself",
        job=changed(elastic(2, losses=1), QUEUE),
        seen=team(2, apis=APIS, queue=LET_IN, capacity=capacity(4, asked=4)),
        want=Want(phase="Running", events=(), fields={"elastic.workers": 2}),
    ),
    Row(
        id="scaled up in a queue: the user's word is enough, the queue decides",
        job=changed(elastic(2, requested_workers=2), {**QUEUE, "workers": 4}),
        seen=team(2, apis=APIS, queue=LET_IN),
        want=Want(phase="Yielding", events=("Resizing",), fields={"elastic.workers": None}),
    ),
    Row(
        id="while the ranks yield for another size the admission is kept",
        job=changed(yielding(elastic(4), "Resize", shape={"workers": 2}), QUEUE),
        seen=team(2, apis=APIS, queue=LET_IN),
        want=Want(phase="Yielding", actions=(DeleteWorkers(attempt=1, grace_s=None, ended=False),)),
    ),
]

FULL = {"attempt": 1, "step": 30, "lastStepTime": stamp(ago(1))}
FLAPPING = [
    Row(
        id="the first steps at full size forget no loss: the room may go again",
        job=changed(elastic(4, losses=1), attemptStartTime=stamp(ago(20)), progress=FULL),
        seen=team(4),
        want=Want(phase="Running", wake_in_s=580, fields={"elastic.losses": 1}),
    ),
    Row(
        id="the full size lasted as long as the next growth would wait: forgotten",
        job=changed(elastic(4, losses=1), attemptStartTime=stamp(ago(600)), progress=FULL),
        seen=team(4),
        want=Want(phase="Running", fields={"elastic.losses": 0}),
    ),
]

OVER_QUOTA = Problem(reason="QuotaExceeded", message="exceeded quota: team-a")
QUOTA = [
    Row(
        id="pods that a quota refuses have no place: on with those that it lets in",
        job=changed(starting(4, s_ago=130), podsCreated=False),
        seen=seen(pending(0), pending(1), problem=OVER_QUOTA, capacity=capacity(4, asked=4)),
        want=Want(
            phase="Yielding",
            fields={"elastic.workers": 2, "elastic.message": "capacity for 2 of 4 workers"},
        ),
    ),
    Row(
        id="a quota that refuses every pod refuses a smaller attempt, too: it waits",
        job=changed(starting(4, s_ago=9000), podsCreated=False),
        seen=seen(problem=OVER_QUOTA, capacity=capacity(4, asked=4)),
        want=Want(phase="Pending", events=("QuotaExceeded",), fields=STAYS),
    ),
]


@pytest.mark.parametrize("row", [*RESUMED, *IN_QUEUE, *FLAPPING, *QUOTA], ids=lambda row: row.id)
def test_what_changes_the_size(row: Row) -> None:
    check(row)


HUGE = {
    "config": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "train_micro_batch_size_per_gpu": 1,
    },
    "model": {"path": "/m", "parameters": 7_000_000_000},
    "resources": {"gpus": {"count": 1, "memory": "20Gi"}, "memory": "200Gi"},
}
"""Spec that fits eight GPUs, and not four."""

HOST = {"resources": {"gpus": {"count": 1, "memory": "80Gi"}, "memory": "200Gi"}}


def overridden(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "metadata": {**body["metadata"], "annotations": {ANNOTATION_IGNORE_MEMORY_PLAN: "true"}}}


MEMORY = [
    Row(
        id="the user's annotation counts for smaller sizes, too",
        job=overridden(changed(starting(8, s_ago=9000, base=8, requested_workers=8), HUGE)),
        seen=placed(6, 8),
        want=Want(phase="Yielding", fields={"elastic.workers": 4}),
    ),
    Row(
        id="the plan that stands in status is that of the size that starts",
        job=changed(elastic(4, base=8, requested_workers=8), {**HUGE, **HOST}, phase="Restarting"),
        seen=seen(),
        want=Want(phase="Pending", fields={"shape.workers": 4, "memoryPlan.ranks": 4}),
    ),
    Row(
        id="pods without a node: a size that the model does not fit is none to go on with",
        job=changed(starting(8, s_ago=9000, base=8, requested_workers=8), HUGE),
        seen=placed(6, 8, capacity=capacity(6, asked=8)),
        want=Want(phase="Pending", events=(), fields=STAYS),
    ),
    Row(
        id="a size that the operator chose before and that does not fit: back to the wish",
        job=changed(elastic(4, base=8, requested_workers=8), HUGE, phase="Restarting"),
        seen=seen(),
        want=Want(
            phase="Pending",
            attempt=2,
            fields={"shape.workers": 8, "elastic.workers": None, "memoryPlan.ranks": 8},
        ),
    ),
    Row(
        id="a spec that is refused for another reason: the size that a failure led to stays",
        job=changed(
            elastic(4, base=8, requested_workers=8, reason="Failure"),
            {"config": {"nonsense": 1}},
            phase="Restarting",
        ),
        seen=seen(),
        want=Want(phase="Stalled", fields={"elastic.workers": 4, "elastic.reason": "Failure"}),
    ),
    Row(
        id="a wish that does not fit is the user's to change",
        job=changed(elastic(4, requested_workers=4, base=8), HUGE, phase="Restarting"),
        seen=seen(),
        want=Want(phase="Stalled", attempt=1, conditions={"Stalled": ("True", "DoesNotFit")}),
    ),
]


@pytest.mark.parametrize("row", MEMORY, ids=lambda row: row.id)
def test_a_size_is_one_that_fits_the_memory(row: Row) -> None:
    check(row)


def test_a_failure_rule_does_not_shrink_below_the_memory() -> None:
    rules = {"failurePolicy": {"rules": [{"onReasons": ["RankFailed"], "action": "ShrinkAndRestart"}]}}
    body = changed(elastic(8, base=8, requested_workers=8), {**HUGE, **rules})
    dead = seen(*(ended(index, 1) for index in range(8)))
    plan, after = run(Row(id="", job=body, seen=dead, want=Want()))
    assert "workers" not in after["elastic"]
    assert "keeps the global batch and fits the memory" in plan.events[0].message


def shrunk_by_rule(s_ago: float, reason: str) -> Row:
    """Row of a job that has had one of two workers for so long, with capacity for both all the time."""
    since = stamp(ago(s_ago))
    state = {"baseWorkers": 2, "requestedWorkers": 2, "workers": 1, "reason": reason, "since": since}
    spec = {"elastic": {"minWorkers": 1, "maxWorkers": 2}}
    more: dict[str, Any] = {
        "shape": {"workers": 1},
        "elastic": {**state, "losses": 1},
        "attemptStartTime": since,
    }
    steps = {"attempt": 1, "step": 50, "lastStepTime": stamp(ago(3))}
    return Row(
        id=f"{reason} {s_ago} s ago",
        job=job(spec=spec, status=status("Running", progress=steps, **more)),
        seen=seen(ready(0), progress=progress(50), capacity=capacity(2, asked=2)),
        want=Want(),
    )


@pytest.mark.parametrize(
    ("s_ago", "reason", "phase"),
    [(400, "Failure", "Running"), (3601, "Failure", "Yielding"), (400, "Capacity", "Yielding")],
)
def test_a_size_that_failed_is_not_grown_back_to_within_the_window(
    s_ago: float, reason: str, phase: str
) -> None:
    check(replace(shrunk_by_rule(s_ago, reason), want=Want(phase=phase)))


def test_a_size_that_failed_counts_like_lost_capacity() -> None:
    rules = {"failurePolicy": {"rules": [{"onReasons": ["RankFailed"], "action": "ShrinkAndRestart"}]}}
    body = changed(elastic(2), rules)
    dead = seen(*(ended(index, 1) for index in range(2)))
    _, after = run(Row(id="", job=body, seen=dead, want=Want()))
    assert after["elastic"]["reason"] == "Failure"
    assert after["elastic"]["losses"] == 1
