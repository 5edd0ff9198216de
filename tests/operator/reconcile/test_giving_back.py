"""Table of `reconcile` for attempts that hold a part of their pods or nodes and are refused the rest: they
give back what they hold, without a charge, and the oldest job of a namespace comes last.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
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
    ready,
    rule,
    run,
    running,
    seen,
    settled,
    stamp,
    status,
)
from zerotrain.operator.reconcile import CreateWorkers, DeleteWorkers, PodView, Problem
from zerotrain.operator.reconcile.observe import START_LIMITS, ClusterApis, QueueView, StartLimits

pytestmark = pytest.mark.unit

NO_NODE = "Unschedulable: 0/8 nodes are available: 8 Insufficient nvidia.com/gpu."
QUOTA = Problem(reason="QuotaExceeded", message="exceeded quota: team, used: pods=90, limited: pods=90")
WEBHOOK = Problem(reason="ApiRefused", message='admission webhook "pods.example.com" denied the request')
END = DeleteWorkers(attempt=1, grace_s=1)
OLDER = "an-older-one"
LATE: dict[str, Any] = {"podsCreated": False}


def homeless(index: int, *, s_ago: float = 500, **more: Any) -> PodView:
    return pending(index, unscheduled_reason=NO_NODE, refused_seen_at=ago(s_ago), **more)


def lacking(reason: str, s_ago: float) -> dict[str, Any]:
    return {"since": stamp(ago(s_ago)), "reason": reason}


def case(
    *pods: PodView,
    id: str,
    want: Want,
    short: tuple[str, float] | None = None,
    older: str | None = OLDER,
    began_s_ago: float = 700,
    spec: dict[str, Any] | None = None,
    problem: Problem | None = None,
    limits: StartLimits = START_LIMITS,
    **stored: Any,
) -> Row:
    """Row of the first attempt of a job of two workers; `short`: the resource that it has lacked, and for how
    many seconds.
    """
    if short is not None:
        stored["shortage"] = lacking(*short)
    taken = {name: stored.pop(name) for name in ("queue", "apis") if name in stored}
    observed = seen(*pods, problem=problem, older_in_shortage=older, limits=limits, **taken)
    body = status(stored.pop("phase", "Pending"), attemptStartTime=stamp(ago(began_s_ago)), **stored)
    return Row(id=id, job=job(spec=spec, status=body), seen=observed, want=want)


GIVES_BACK: dict[str, Any] = {
    "givenBack.times": 1,
    "shortage": None,
    "startTime": None,
    "restarts.total": 0,
    "failures.0": None,
}

CREATION = [
    case(
        running(0),
        id="a quota refuses the rest: from now on the time counts",
        problem=QUOTA,
        **LATE,
        want=Want(
            phase="Pending",
            events=("QuotaExceeded",),
            actions=(CreateWorkers(attempt=1, indices=(1,)),),
            fields={"shortage.reason": "QuotaExceeded", "shortage.since": stamp(NOW)},
            wake_in_s=10,
        ),
    ),
    case(
        running(0),
        id="for a minute: all pods go, in one event and one condition, at no cost",
        problem=QUOTA,
        short=("QuotaExceeded", 60),
        **LATE,
        want=Want(
            phase="Restarting",
            actions=(END,),
            events=("GaveBack",),
            fields=GIVES_BACK,
            conditions={"PodsScheduled": ("False", "GaveBack")},
            messages={
                "event": "attempt 1 releases its resources: "
                f"for 60 s 1 of 2 pods are refused: {QUOTA.message}"
            },
        ),
    ),
    case(
        pending(0),
        id="a pod without a node counts in the quota as well",
        problem=QUOTA,
        short=("QuotaExceeded", 60),
        **LATE,
        want=Want(phase="Restarting", fields=GIVES_BACK),
    ),
    case(
        running(0),
        id="a webhook that denies some is no better",
        problem=WEBHOOK,
        short=("ApiRefused", 60),
        **LATE,
        want=Want(phase="Restarting", messages={"event": WEBHOOK.message}, fields=GIVES_BACK),
    ),
    case(
        running(0),
        id="a moment before: it tries again soon, as others may have given back",
        problem=QUOTA,
        short=("QuotaExceeded", 58),
        **LATE,
        want=Want(phase="Pending", wake_in_s=2),
    ),
    case(
        id="of which no pod exists holds nothing",
        problem=QUOTA,
        **LATE,
        want=Want(phase="Pending", fields={"shortage": None, "startTime": stamp(ago(600))}),
    ),
    case(
        running(0),
        id="pods that are being made are not refused",
        **LATE,
        want=Want(phase="Pending", fields={"shortage": None}),
    ),
    case(
        running(0),
        id="an operator that has just begun has not been refused yet, and forgets nothing",
        short=("QuotaExceeded", 30),
        **LATE,
        want=Want(phase="Pending", fields={"shortage.since": stamp(ago(30))}),
    ),
    case(
        running(0),
        running(1),
        id="all exist by now: nothing is lacking",
        short=("QuotaExceeded", 59),
        **LATE,
        want=Want(phase="Starting", fields={"shortage": None}),
    ),
    case(
        running(0),
        id="the oldest comes last: what the others give back may be all that it lacks",
        problem=QUOTA,
        short=("QuotaExceeded", 60),
        older=None,
        **LATE,
        want=Want(phase="Pending", events=("QuotaExceeded",), fields={"shortage.reason": "QuotaExceeded"}),
    ),
    case(
        running(0),
        id="but it does give back",
        problem=QUOTA,
        short=("QuotaExceeded", 120),
        older=None,
        **LATE,
        want=Want(phase="Restarting", fields=GIVES_BACK, messages={"event": "for 120 s"}),
    ),
    case(
        running(0),
        id="the limits are the operator's options",
        problem=QUOTA,
        short=("QuotaExceeded", 5),
        limits=StartLimits(refused_creation_s=5),
        **LATE,
        want=Want(phase="Restarting", fields=GIVES_BACK),
    ),
]

KUEUE: dict[str, Any] = {
    "apis": ClusterApis(at=ago(5), kueue="kueue.x-k8s.io/v1beta2"),
    "queue": QueueView(exists=True, workers=2, queue="q", admitted=True, holds_quota=True),
    "spec": {"scheduling": {"queueName": "q"}},
}

NODES = [
    case(
        running(0),
        homeless(1),
        id="the rest finds no node: from now on the time counts",
        want=Want(
            phase="Pending",
            events=(),
            actions=(),
            fields={"shortage.reason": "Unschedulable", "shortage.since": stamp(NOW)},
            wake_in_s=600,
        ),
    ),
    case(
        running(0),
        homeless(1),
        id="for ten minutes, so that an autoscaler could act: all pods go",
        short=("Unschedulable", 600),
        want=Want(
            phase="Restarting",
            actions=(END,),
            events=("GaveBack",),
            fields=GIVES_BACK,
            messages={"event": f"for 600 s 1 of 2 pods have no node: worker 1 (pod gpt-1-1): {NO_NODE}"},
        ),
    ),
    case(
        homeless(0),
        homeless(1),
        id="of which no pod has a node holds nothing: it is left to scheduler and autoscaler",
        began_s_ago=9_000_000,
        want=Want(phase="Pending", events=(), actions=(), fields={"shortage": None}),
    ),
    case(
        running(0),
        homeless(1),
        id="the user's own deadline goes before the operator's",
        short=("Unschedulable", 30),
        spec={"runPolicy": {"startDeadlineSeconds": 30}},
        want=Want(phase="Restarting", events=("GaveBack",), fields=GIVES_BACK),
    ),
    case(
        running(0),
        homeless(1),
        id="whatever the gang",
        short=("Unschedulable", 600),
        spec={"scheduling": {"gang": "Volcano"}},
        shape={"workers": 2, "gang": "scheduling.volcano.sh/v1beta1"},
        want=Want(phase="Restarting", events=("GaveBack",), fields=GIVES_BACK),
    ),
    case(
        running(0),
        pending(1, unscheduled_reason=NO_NODE),
        id="a pod for which the scheduler makes a place waits for its turn",
        began_s_ago=100,
        want=Want(phase="Pending", events=(), fields={"shortage": None}, wake_in_s=500),
    ),
    case(
        running(0),
        pending(1),
        id="but not for ever, as where no scheduler looks at it",
        began_s_ago=1300,
        short=("Unschedulable", 600),
        want=Want(phase="Restarting", events=("GaveBack",), messages={"event": "has not placed it"}),
    ),
    case(
        running(0),
        homeless(1),
        id="the oldest comes last",
        short=("Unschedulable", 600),
        older=None,
        want=Want(phase="Pending", events=(), wake_in_s=60),
    ),
    case(
        ready(0),
        ready(1),
        id="found at last",
        short=("Unschedulable", 599),
        want=Want(phase="Running", fields={"shortage": None}),
    ),
    case(
        running(0),
        homeless(1),
        id="in a queue of Kueue its waitForPodsReady decides",
        short=("Unschedulable", 6000),
        **KUEUE,
        want=Want(phase="Pending", events=(), fields={"givenBack": None}),
    ),
    case(
        running(0),
        id="also about pods that a quota refuses beside the queue's",
        problem=QUOTA,
        **LATE,
        **KUEUE,
        want=Want(phase="Pending", events=("QuotaExceeded",), fields={"givenBack": None, "shortage": None}),
    ),
]

FAIL_82 = {"failurePolicy": {"rules": [rule("FailJob", onExitCodes=[82])]}}
GAVE_UP = [
    case(
        ended(0, 82),
        homeless(1),
        id="ranks gave up waiting for one that finds no node: the same, and no rule is asked",
        began_s_ago=310,
        spec=FAIL_82,
        phase="Starting",
        want=Want(
            phase="Restarting",
            events=("GaveBack",),
            fields=GIVES_BACK,
            messages={"event": "exit code 82"},
        ),
    ),
    case(
        ended(0, 82),
        id="and for one that a quota refuses",
        problem=QUOTA,
        **LATE,
        want=Want(phase="Restarting", events=("GaveBack",), fields=GIVES_BACK),
    ),
    case(
        ended(0, 82),
        homeless(1),
        id="in a queue, too",
        **KUEUE,
        want=Want(phase="Restarting", events=("GaveBack",), fields=GIVES_BACK),
    ),
    case(
        ended(0, 82),
        pending(1, scheduled=True, node="node-1", waiting="ErrImagePull: no such image"),
        id="one that has a node and does not start is to blame",
        want=Want(phase="Restarting", events=("RendezvousTimeout",), fields={"restarts.infra": 1}),
    ),
    case(
        ended(0, 1),
        homeless(1),
        id="a program that fails by itself is no victim of the nodes",
        want=Want(phase="Restarting", events=("RankFailed",), fields={"restarts.app": 1}),
    ),
]


def between(times: int = 1, *, s_left: float = 0, older: str | None = None, **spec: Any) -> Row:
    """Row after an attempt that gave back, with so many seconds of the hold-off left."""
    due = None if not s_left else stamp(ago(-s_left))
    stored: dict[str, Any] = {
        "givenBack": {"times": times, "message": "for 60 s all"},
        "nextAttemptTime": due,
    }
    body = job(spec=spec, status=status("Restarting", startTime=None, **stored))
    return Row(id="", job=body, seen=seen(older_in_shortage=older), want=Want())


AFTERWARDS = [
    replace(
        between(s_left=7),
        id="the hold-off, and why",
        want=Want(
            phase="Restarting",
            actions=(),
            wake_in_s=7,
            conditions={"Reconciling": ("True", "GaveBack"), "Ready": ("False", "GaveBack")},
            messages={"Ready": "released its resources: for 60 s all; attempt 2 starts after the hold-off"},
        ),
    ),
    replace(
        between(),
        id="then the next attempt",
        want=Want(phase="Pending", attempt=2, actions=(CreateWorkers(attempt=2, indices=(0, 1)),), events=()),
    ),
    replace(
        between(older=OLDER),
        id="unless an older one still lacks what was given back",
        want=Want(
            phase="Restarting", attempt=1, actions=(), wake_in_s=10, messages={"Ready": f"job {OLDER}"}
        ),
    ),
    replace(
        between(older=OLDER, suspend=True),
        id="a suspension does not wait for it",
        want=Want(phase="Suspended", fields={"givenBack": None}),
    ),
    case(
        ready(0),
        ready(1),
        id="an attempt whose ranks met ends the row",
        givenBack={"times": 3},
        want=Want(phase="Running", fields={"givenBack": None}),
    ),
    case(
        ended(0, 1),
        running(1),
        id="one that fails for another reason does not",
        givenBack={"times": 3},
        want=Want(phase="Restarting", fields={"givenBack.times": 3, "restarts.app": 1}),
    ),
]


ROWS = [*CREATION, *NODES, *GAVE_UP, *AFTERWARDS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_giving_back(row: Row) -> None:
    check(row)


def test_what_was_decided_is_not_written_again() -> None:
    for row in ROWS:
        again = settled(settled(row.job, row.seen), row.seen)
        plan, _ = run(replace(row, job=again))
        assert plan.status is None, row.id


def hold_off_s(times: int, uid: str = "u", limits: StartLimits = START_LIMITS, attempt: int = 1) -> float:
    """Return the hold-off after the `times`th attempt in a row that gave back."""
    row = case(
        running(0, attempt),
        id="",
        problem=QUOTA,
        short=("QuotaExceeded", 60),
        limits=limits,
        givenBack={"times": times - 1} if times > 1 else None,
        **LATE,
        want=Want(),
    )
    body = {**row.job, "metadata": {**row.job["metadata"], "uid": uid}}
    body["status"] = {**body["status"], "attempt": attempt}
    plan, _ = run(replace(row, job=body))
    assert plan.status is not None
    assert plan.status.next_attempt_time is not None
    return (plan.status.next_attempt_time - NOW) / timedelta(seconds=1)


def test_the_hold_off_grows_and_is_bounded() -> None:
    found = [hold_off_s(times) for times in range(1, 12)]
    assert 7.5 <= found[0] <= 15
    assert all(later > earlier for earlier, later in pairwise(found[:5]))
    assert all(150 <= late <= 300 for late in found[5:])
    assert hold_off_s(9, limits=StartLimits(max_hold_off_s=4)) <= 4


def test_the_hold_off_differs_from_job_to_job_and_from_attempt_to_attempt() -> None:
    assert len({hold_off_s(9, uid=f"uid-{number}") for number in range(50)}) == 50
    assert len({hold_off_s(9, attempt=number) for number in range(1, 51)}) == 50
    assert hold_off_s(9) == hold_off_s(9), "an operator that starts again decides the same"


def test_no_number_of_times_ends_the_job() -> None:
    budgets = {"maxRestarts": 0, "maxInfrastructureRestarts": 0, "maxRestartsWithoutProgress": 1}
    row = case(
        running(0),
        homeless(1),
        id="",
        short=("Unschedulable", 600),
        spec={"failurePolicy": budgets},
        givenBack={"times": 1000},
        want=Want(phase="Restarting", fields={"givenBack.times": 1001, "restarts.total": 0}),
    )
    check(row)
