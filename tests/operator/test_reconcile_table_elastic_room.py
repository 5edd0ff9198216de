"""Only counted room changes the size of an elastic job: not a turn in a queue, not a guess, not a refused
pod, and no size whose workers could not hold the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
    pending,
    progress,
    ready,
    run,
    seen,
    stamp,
    status,
)
from tests.operator.test_reconcile_table_elastic import (
    changed,
    elastic,
    placed,
    room,
    starting,
    team,
    yielding,
)
from zerotrain.operator.api import AttemptShape
from zerotrain.operator.constants import ANNOTATION_IGNORE_MEMORY_PLAN
from zerotrain.operator.reconcile import AskQueue, AskRoom, DeleteWorkers, Problem
from zerotrain.operator.reconcile.queues import ClusterApis, QueueStep, QueueView

APIS = ClusterApis(at=ago(5), kueue="kueue.x-k8s.io/v1beta2")
OURS = {"scheduling": {"gang": "Operator"}}
QUEUE = {"scheduling": {"queueName": "team-a"}}
TURN = QueueView(exists=True, workers=4, queue="team-a", message="insufficient quota")
LET_IN = QueueView(exists=True, workers=2, queue="team-a", admitted=True, holds_quota=True, pods_ready=True)


def waiting(spec: Mapping[str, Any], *, s_ago: float | None = 600, **state: Any) -> dict[str, Any]:
    """Queued, in want of room since so many seconds."""
    since: dict[str, Any] = {} if s_ago is None else {"shortSince": stamp(ago(s_ago))}
    body = changed(elastic(4, **since, **state), spec, phase="Queued", startTime=None)
    return changed(body, protectedAttempt=None)


STAYS: dict[str, Any] = {"elastic.workers": None, "elastic.losses": 0}
GATE = [
    Row(
        id="nodes are missing for long enough: the next attempt has fewer workers",
        job=waiting(OURS),
        seen=seen(apis=APIS, capacity=room(3, asked=4)),
        want=Want(
            phase="Queued",
            events=("Shrunk",),
            fields={"elastic.workers": 2, "elastic.message": "room for 3 of 4 workers"},
        ),
    ),
    Row(
        id="nodes are missing: from now on the time counts",
        job=waiting(OURS, s_ago=None),
        seen=seen(apis=APIS, capacity=room(3, asked=4)),
        want=Want(phase="Queued", events=(), wake_in_s=120, fields={"elastic.shortSince": stamp(NOW)}),
    ),
    Row(
        id="a new operator counts before it decides",
        job=waiting(OURS),
        seen=seen(apis=APIS),
        want=Want(phase="Queued", events=(), fields=STAYS),
    ),
    Row(
        id="an old count is none",
        job=waiting(OURS),
        seen=seen(apis=APIS, capacity=replace(room(2, asked=4), at=ago(31))),
        want=Want(phase="Queued", events=(), fields=STAYS),
    ),
    Row(
        id="a count for another size is none",
        job=waiting(OURS),
        seen=seen(apis=APIS, capacity=room(1, asked=2)),
        want=Want(phase="Queued", events=(), fields=STAYS),
    ),
    Row(
        id="a count of nodes that meanwhile are kept off, or not any more, is none",
        job=waiting(OURS),
        seen=seen(
            apis=APIS,
            capacity=room(2, asked=4),
            question=AskRoom(shape=AttemptShape(workers=4, excluded_nodes=("node-7",))),
        ),
        want=Want(phase="Queued", events=(), fields=STAYS),
    ),
    Row(
        id="room for all, but others go first: a turn is no lack of nodes",
        job=waiting(OURS),
        seen=seen(apis=APIS, capacity=replace(room(4, asked=4), admitted=False)),
        want=Want(phase="Queued", events=(), fields={**STAYS, "elastic.shortSince": None}),
    ),
    Row(
        id="behind so many others that nobody looks: nor is that",
        job=waiting(OURS),
        seen=seen(apis=APIS, capacity=replace(room(0, asked=4), fits=None)),
        want=Want(phase="Queued", events=(), fields={**STAYS, "elastic.shortSince": None}),
    ),
    Row(
        id="a turn in a queue is no lack of nodes: the Workload stays",
        job=waiting(QUEUE),
        seen=seen(apis=APIS, queue=TURN),
        want=Want(phase="Queued", actions=(), events=(), fields={**STAYS, "elastic.shortSince": None}),
    ),
    Row(
        id="without Kueue nobody knows of room",
        job=waiting(QUEUE),
        seen=seen(apis=replace(APIS, kueue=None)),
        want=Want(phase="Queued", events=(), fields=STAYS),
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
    Row(
        id="nodes that the job itself keeps off are named beside what is missing",
        job=changed(
            waiting(OURS, s_ago=10),
            excludedNodes=[{"name": "node-7", "until": stamp(ago(-60)), "reason": "SpillIntegrity"}],
        ),
        seen=seen(
            apis=APIS,
            capacity=replace(room(3, asked=4), message="room for 3 of 4 workers"),
            question=AskRoom(shape=AttemptShape(workers=4, excluded_nodes=("node-7",))),
        ),
        want=Want(
            phase="Queued",
            says={"Admitted": "room for 3 of 4 workers; the job keeps off node-7 after failures"},
        ),
    ),
]

IN_QUEUE = [
    Row(
        id="free nodes are no quota: an admitted job does not grow by itself",
        job=changed(elastic(2, losses=1, roomSince=stamp(ago(9000))), QUEUE),
        seen=team(2, apis=APIS, queue=LET_IN, capacity=room(4, asked=4)),
        want=Want(phase="Running", events=(), fields={"elastic.workers": 2}),
    ),
    Row(
        id="scaled up in a queue: the user's word is enough, the queue decides",
        job=changed(elastic(2, wish=2), {**QUEUE, "workers": 4}),
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

FLAVOR = {"pool": "gpu"}
ON_FLAVOR = AskRoom(shape=AttemptShape(workers=4, node_selector=FLAVOR))
STARTED = replace(LET_IN, workers=4, node_selector=FLAVOR, pods_ready=False)
STARTING = changed(starting(4, s_ago=130), QUEUE, shape={"workers": 4, "nodeSelector": FLAVOR})
ON_ADMITTED_NODES = [
    Row(
        id="the nodes of its flavor are counted, and no others",
        job=STARTING,
        seen=placed(3, 4, apis=APIS, queue=STARTED),
        want=Want(phase="Pending", actions=(ON_FLAVOR,), wake_in_s=20),
    ),
    Row(
        id="free nodes of another flavor are no room",
        job=STARTING,
        seen=placed(
            3,
            4,
            apis=APIS,
            queue=STARTED,
            question=AskRoom(shape=AttemptShape(workers=4)),
            capacity=room(4, asked=4),
        ),
        want=Want(phase="Pending", actions=(ON_FLAVOR,), fields=STAYS),
    ),
    Row(
        id="its flavor has no node left: on with those that have one",
        job=STARTING,
        seen=placed(3, 4, apis=APIS, queue=STARTED, question=ON_FLAVOR, capacity=room(3, asked=4)),
        want=Want(phase="Yielding", fields={"elastic.workers": 2}),
    ),
    Row(
        id="a new operator counts by what the attempt was given until the Workloads are listed",
        job=STARTING,
        seen=placed(3, 4, apis=APIS),
        want=Want(
            phase="Pending",
            actions=(ON_FLAVOR, AskQueue(step=QueueStep.FOLLOW, workers=4, message="the job is Pending")),
        ),
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
        seen=seen(pending(0), pending(1), problem=OVER_QUOTA, capacity=room(4, asked=4)),
        want=Want(
            phase="Yielding",
            fields={"elastic.workers": 2, "elastic.message": "room for 2 of 4 workers"},
        ),
    ),
    Row(
        id="a quota that refuses every pod refuses a smaller attempt, too: it waits",
        job=changed(starting(4, s_ago=9000), podsCreated=False),
        seen=seen(problem=OVER_QUOTA, capacity=room(4, asked=4)),
        want=Want(phase="Pending", events=(), fields=STAYS),
    ),
    Row(
        id="pods that are still to be made are not placed",
        job=changed(starting(4, s_ago=151), podsCreated=False),
        seen=seen(pending(0), pending(1, scheduled=True)),
        want=Want(phase="Yielding", fields={"elastic.workers": 1}),
    ),
]


@pytest.mark.parametrize(
    "row", [*GATE, *IN_QUEUE, *ON_ADMITTED_NODES, *FLAPPING, *QUOTA], ids=lambda row: row.id
)
def test_room_is_what_was_counted(row: Row) -> None:
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
"""Fits eight GPUs, and not four."""

HOST = {"resources": {"gpus": {"count": 1, "memory": "80Gi"}, "memory": "200Gi"}}


def overridden(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "metadata": {**body["metadata"], "annotations": {ANNOTATION_IGNORE_MEMORY_PLAN: "true"}}}


MEMORY = [
    Row(
        id="no room, and the model does not fit the smaller sizes: it waits for room for all",
        job=waiting({**OURS, **HUGE, "workers": 8}, base=8, wish=8, workers=None),
        seen=seen(apis=APIS, capacity=room(6, asked=8)),
        want=Want(phase="Queued", conditions={"Stalled": ("False", "SpecAccepted")}, fields=STAYS),
    ),
    Row(
        id="the user's annotation counts for smaller sizes, too",
        job=overridden(waiting({**OURS, **HUGE, "workers": 8}, base=8, wish=8, workers=None)),
        seen=seen(apis=APIS, capacity=room(6, asked=8)),
        want=Want(phase="Queued", fields={"elastic.workers": 4}),
    ),
    Row(
        id="pods without a node: a size that the model does not fit is none to go on with",
        job=changed(starting(8, s_ago=9000, base=8, wish=8), HUGE),
        seen=placed(6, 8, capacity=room(6, asked=8)),
        want=Want(phase="Pending", events=(), fields=STAYS),
    ),
    Row(
        id="the plan that stands in status is that of the size that starts",
        job=waiting({**OURS, **HUGE, **HOST, "workers": 8}, base=8, wish=8, workers=None),
        seen=seen(apis=APIS, capacity=room(6, asked=8)),
        want=Want(phase="Queued", fields={"elastic.workers": 4, "memoryPlan.ranks": 4}),
    ),
    Row(
        id="a size that the operator chose before and that does not fit: back to the wish",
        job=changed(elastic(4, base=8, wish=8), HUGE, phase="Restarting"),
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
            elastic(4, base=8, wish=8, reason="Failure"), {"config": {"nonsense": 1}}, phase="Restarting"
        ),
        seen=seen(),
        want=Want(phase="Stalled", fields={"elastic.workers": 4, "elastic.reason": "Failure"}),
    ),
    Row(
        id="a wish that does not fit is the user's to change",
        job=changed(elastic(4, wish=4, base=8), HUGE, phase="Restarting"),
        seen=seen(),
        want=Want(phase="Stalled", attempt=1, conditions={"Stalled": ("True", "DoesNotFit")}),
    ),
]


@pytest.mark.parametrize("row", MEMORY, ids=lambda row: row.id)
def test_a_size_is_one_that_fits_the_memory(row: Row) -> None:
    check(row)


def test_a_failure_rule_does_not_shrink_below_the_memory() -> None:
    rules = {"failurePolicy": {"rules": [{"onReasons": ["RankFailed"], "action": "ShrinkAndRestart"}]}}
    body = changed(elastic(8, base=8, wish=8), {**HUGE, **rules})
    dead = seen(*(ended(index, 1) for index in range(8)))
    plan, after = run(Row(id="", job=body, seen=dead, want=Want()))
    assert "workers" not in after["elastic"]
    assert "keeps the global batch and fits the memory" in plan.events[0].message


def shrunk_by_rule(s_ago: float, reason: str) -> Row:
    """One of two workers, since so long ago, with room for both ever since."""
    since = stamp(ago(s_ago))
    state = {"baseWorkers": 2, "wish": 2, "workers": 1, "reason": reason, "since": since, "roomSince": since}
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
        seen=seen(ready(0), progress=progress(50), capacity=room(2, asked=2)),
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


def test_a_size_that_failed_counts_like_room_that_was_lost() -> None:
    rules = {"failurePolicy": {"rules": [{"onReasons": ["RankFailed"], "action": "ShrinkAndRestart"}]}}
    body = changed(elastic(2), rules)
    dead = seen(*(ended(index, 1) for index in range(2)))
    _, after = run(Row(id="", job=body, seen=dead, want=Want()))
    assert after["elastic"]["reason"] == "Failure"
    assert after["elastic"]["losses"] == 1
