"""reconcile when a gang that the operator let in finds nodes for some of its workers alone."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
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
    restarts,
    running,
    seen,
    settled,
    stamp,
    status,
)
from tests.operator.test_reconcile_capacity import claim, node
from zerotrain.operator.reconcile import CreateWorkers, DeleteWorkers, Observed, PodView, reconcile
from zerotrain.operator.reconcile.capacity import admit
from zerotrain.operator.reconcile.claims import Verdict

END_ALL = DeleteWorkers(attempt=1, grace_s=1)
OWN = {"workers": 2, "gang": "Operator"}
IN_RACKS = {"scheduling": {"gang": "Operator", "topologyKey": "rack"}}
NO_NODE = "Unschedulable: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu."


def refused(index: int, s_ago: float = 60) -> PodView:
    return pending(index, unscheduled_reason=NO_NODE, refused_seen_at=ago(s_ago))


def gang(*pods: PodView, id: str, want: Want, shape: Any = OWN, phase: str = "Pending", **more: Any) -> Row:
    """A first attempt that began ten minutes ago."""
    spec = {"scheduling": {"gang": "Operator"}, **more.pop("spec", {})}
    stored = status(phase, attemptStartTime=stamp(ago(600)), shape=shape, **more)
    return Row(id=id, job=job(spec=spec, status=stored), seen=seen(*pods), want=want)


ROWS = [
    gang(
        running(0),
        refused(1),
        id="it gives its nodes back, at nobody's cost",
        want=Want(
            phase="Restarting",
            actions=(END_ALL,),
            events=("HalfBound",),
            fields={
                "restarts.uncharged": 1,
                "restarts.infra": 0,
                "restarts.app": 0,
                "restarts.preemption": 0,
                "failures.0": None,
                "nextAttemptTime": None,
            },
            says={"event": f"1 of 2 workers found no node within 60 s: worker 1 (pod gpt-1-1): {NO_NODE}"},
        ),
    ),
    gang(
        pending(0, scheduled=True, node="node-0", waiting="ImagePullBackOff"),
        refused(1),
        id="also where nothing has started on the nodes that it holds",
        want=Want(phase="Restarting", events=("HalfBound",)),
    ),
    gang(
        running(0),
        refused(1, 50),
        id="not before the scheduler had its time: looks again then",
        want=Want(phase="Pending", events=(), wake_in_s=10),
    ),
    gang(
        refused(0),
        refused(1),
        id="who holds no node keeps nobody from any",
        want=Want(phase="Pending", actions=(), events=()),
    ),
    gang(
        refused(0),
        refused(1),
        id="unless its pods may not go where room becomes free: they avoid nodes for those that were ahead",
        shape={**OWN, "avoidedNodes": ["big-1", "big-2", "big-3", "big-4"]},
        want=Want(
            phase="Restarting",
            actions=(END_ALL,),
            events=("HalfBound",),
            fields={"restarts.uncharged": 1, "failures.0": None, "nextAttemptTime": None},
            says={
                "event": "2 of 2 workers found no node within 60 s without big-1, big-2, big-3 and 1 more: "
                f"worker 0 (pod gpt-1-0): {NO_NODE}"
            },
        ),
    ),
    gang(
        refused(0),
        refused(1),
        id="or all are to go to the rack that was the best at the time",
        spec=IN_RACKS,
        shape={**OWN, "nodeSelector": {"rack": "r7"}},
        want=Want(phase="Restarting", events=("HalfBound",), says={"event": "within 60 s with rack=r7"}),
    ),
    gang(
        refused(0),
        id="also one worker alone",
        spec={**IN_RACKS, "workers": 1},
        shape={"workers": 1, "gang": "Operator", "nodeSelector": {"rack": "r7"}},
        want=Want(phase="Restarting", events=("HalfBound",)),
    ),
    gang(
        refused(0),
        refused(1, 50),
        id="not before the scheduler had its time for all of them",
        shape={**OWN, "avoidedNodes": ["big-1"]},
        want=Want(phase="Pending", events=(), wake_in_s=10),
    ),
    gang(
        refused(0),
        pending(1, unscheduled_reason=NO_NODE),
        id="nor while it makes room for one of them",
        shape={**OWN, "avoidedNodes": ["big-1"]},
        want=Want(phase="Pending", actions=(), events=()),
    ),
    gang(
        refused(0),
        refused(1),
        id="the selector of a queue is the queue's business",
        shape={**OWN, "nodeSelector": {"pool": "spot"}},
        want=Want(phase="Pending", actions=(), events=()),
    ),
    gang(
        running(0),
        pending(1, unscheduled_reason=NO_NODE),
        id="a place that the scheduler makes free by preemption is waited for",
        want=Want(phase="Pending", actions=(), events=()),
    ),
    gang(
        running(0),
        refused(1),
        id="without a gang each pod waits for itself",
        shape={"workers": 2},
        want=Want(phase="Pending", actions=(), events=()),
    ),
    gang(
        running(0),
        refused(1),
        id="a scheduler's gang is the scheduler's business",
        shape={"workers": 2, "gang": "scheduling.k8s.io/v1alpha2"},
        want=Want(phase="Pending", actions=(), events=()),
    ),
    gang(
        ended(0, 1, s_ago=60),
        refused(1),
        id="a rank that failed meanwhile is a failure",
        want=Want(phase="Restarting", events=("RankFailed",), fields={"restarts.app": 1}),
    ),
    gang(
        running(0),
        refused(1),
        id="again and again: ever more rarely",
        restarts=restarts("preemption", 700, 650, reason="HalfBound", steps=(0, 0)),
        want=Want(
            phase="Restarting",
            fields={"nextAttemptTime": stamp(ago(-10))},
            says={"event": "asks for room anew in 10 s"},
        ),
    ),
    gang(
        running(0),
        refused(1),
        id="without end: room that others took is no fault of the job",
        restarts=restarts("preemption", *range(4000, 1000, -100), reason="HalfBound", steps=(0,) * 30),
        spec={"failurePolicy": {"maxRestartsWithoutProgress": 1, "maxRestarts": 0}},
        want=Want(phase="Restarting", fields={"nextAttemptTime": stamp(ago(-300))}),
    ),
    gang(
        phase="Restarting",
        id="the hold-off asks for no room",
        nextAttemptTime=stamp(ago(-10)),
        want=Want(phase="Restarting", actions=(), wake_in_s=10),
    ),
    gang(
        phase="Restarting",
        id="then it queues",
        want=Want(phase="Queued", events=("WaitingForRoom",)),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_half_of_a_gang(row: Row) -> None:
    check(row)


def test_two_half_bound_gangs_do_not_wait_for_each_other() -> None:
    """Two nodes, two jobs of two workers that each hold one of them."""
    jobs = {}
    for index, name in enumerate(("old", "young")):
        holding = Observed(pods=(running(index), refused(1 - index)), synced_at=ago(3600))
        stored = status("Pending", attemptStartTime=stamp(ago(60)), shape=OWN)
        body = job(spec={"scheduling": {"gang": "Operator"}}, status=stored)
        assert reconcile(body, holding, NOW).actions == (END_ALL,)
        jobs[name] = settled(body, holding)
    later = NOW + timedelta(seconds=3)
    queued = {name: settled(body, seen(), later) for name, body in jobs.items()}
    assert [body["status"]["phase"] for body in queued.values()] == ["Queued", "Queued"]
    claims = [claim("young", 2), claim("old", 2, age=9)]
    verdicts = admit([node("a"), node("b")], claims)
    plans = {name: _told(queued[name], verdicts[name], later) for name in queued}
    assert plans["old"] == (CreateWorkers(attempt=2, indices=(0, 1)),)
    assert not any(isinstance(action, CreateWorkers) for action in plans["young"])


def _told(body: dict[str, Any], verdict: Verdict, now: datetime) -> tuple[Any, ...]:
    plan = reconcile(body, replace(seen(), capacity=replace(verdict, at=now)), now)
    return plan.actions
