"""Table of `reconcile` for workers that have to leave their nodes, and for the budget that prevents
evictions.
"""

from __future__ import annotations

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
    going,
    job,
    last_words,
    progress,
    ready,
    restarts,
    running,
    seen,
    stamp,
    status,
)
from zerotrain.operator.reconcile import (
    CreateWorkers,
    DeleteWorkers,
    Protection,
    ProtectWorkers,
    RequestYield,
    UnprotectWorkers,
    YieldState,
)
from zerotrain.operator.reconcile.nodes import NodeTaint, NodeView

pytestmark = pytest.mark.unit


YIELD = RequestYield(attempt=1, pod="gpt-1-0", pod_ip="10.0.0.0")
CORDONED = {"node-1": NodeView(name="node-1", unschedulable=True)}


def tainted(key: str, effect: str = "NoExecute", **more: Any) -> dict[str, NodeView]:
    return {"node-1": NodeView(name="node-1", taints=(NodeTaint(key=key, effect=effect),), **more)}


def tolerating(**toleration: Any) -> dict[str, Any]:
    return job(spec={"scheduling": {"tolerations": [toleration]}}, status=status("Running"))


def moving(*, s_ago: float = 10, **more: Any) -> dict[str, Any]:
    """Return a job whose ranks were asked to yield because a worker has to leave its node."""
    asked = stamp(ago(s_ago))
    request = {"reason": "Drain", "requestedAt": asked, "message": "worker 1 has to go", **more}
    return job(status=status("Yielding", yieldRequest=request, checkpoint={"requestedAt": asked}))


MOVES = [
    Row(
        id="one node is cordoned: all ranks yield",
        job=job(status=status("Running")),
        seen=seen(ready(0), ready(1), nodes=CORDONED),
        want=Want(
            phase="Yielding",
            actions=(YIELD,),
            events=("Draining",),
            fields={"yieldRequest.reason": "Drain", "yieldRequest.requestedAt": stamp(NOW)},
            messages={"event": "(pod gpt-1-1) has to leave node node-1, which is cordoned: all workers move"},
            conditions={"CheckpointDurable": ("False", "CheckpointRequested")},
        ),
    ),
    Row(
        id="a taint that evicts",
        job=job(status=status("Running")),
        seen=seen(ready(0), ready(1), nodes=tainted("example.com/maintenance")),
        want=Want(phase="Yielding", messages={"event": "has the taint example.com/maintenance"}),
    ),
    Row(
        id="an autoscaler that announces the end of the node",
        job=job(status=status("Running")),
        seen=seen(ready(0), ready(1), nodes=tainted("ToBeDeletedByClusterAutoscaler", "NoSchedule")),
        want=Want(phase="Yielding", events=("Draining",)),
    ),
    Row(
        id="a taint that only keeps new pods away",
        job=job(status=status("Running")),
        seen=seen(ready(0), ready(1), nodes=tainted("nvidia.com/gpu", "NoSchedule")),
        want=Want(phase="Running", actions=(), events=()),
    ),
    Row(
        id="a taint that the job tolerates",
        job=tolerating(key="example.com/maintenance", operator="Exists"),
        seen=seen(ready(0), ready(1), nodes=tainted("example.com/maintenance")),
        want=Want(phase="Running", events=()),
    ),
    Row(
        id="a taint that the job tolerates for a minute",
        job=tolerating(key="example.com/maintenance", operator="Exists", tolerationSeconds=60),
        seen=seen(ready(0), ready(1), nodes=tainted("example.com/maintenance")),
        want=Want(phase="Yielding"),
    ),
    Row(
        id="a cordon that the job tolerates would bring it back there",
        job=tolerating(key="node.kubernetes.io/unschedulable", operator="Exists"),
        seen=seen(ready(0), ready(1), nodes=CORDONED),
        want=Want(phase="Running", events=()),
    ),
    Row(
        id="a node that does not answer is lost, not drained",
        job=job(status=status("Running")),
        seen=seen(
            ready(0),
            ready(1),
            nodes=tainted("node.kubernetes.io/unreachable", ready=False, unschedulable=True),
        ),
        want=Want(phase="Running", events=()),
    ),
    Row(
        id="nor is one whose taint says so before its condition does",
        job=job(status=status("Running")),
        seen=seen(ready(0), ready(1), nodes=tainted("node.kubernetes.io/unreachable")),
        want=Want(phase="Running", events=()),
    ),
    Row(
        id="a worker that is preempted takes all others along, through the channel",
        job=job(status=status("Running")),
        seen=seen(ready(0), going(1, disruption="PreemptionByScheduler")),
        want=Want(
            phase="Yielding",
            actions=(YIELD,),
            messages={"event": "(pod gpt-1-1) has to stop (PreemptionByScheduler)"},
        ),
    ),
    Row(
        id="two nodes at once are one move",
        job=moving(),
        seen=seen(
            ready(0),
            ready(1),
            nodes={**CORDONED, "node-0": NodeView(name="node-0", unschedulable=True)},
            yielding=YieldState(attempt=1, acked_at=ago(9)),
        ),
        want=Want(phase="Yielding", actions=(), events=()),
    ),
    Row(
        id="all yielded: the checkpoint is in status before the pods go, whatever the clock of its node",
        job=moving(s_ago=2),
        seen=seen(ended(0, 75, termination=last_words(75, step=42)), ended(1, 75), nodes=CORDONED),
        want=Want(
            phase="Yielding",
            actions=(DeleteWorkers(attempt=1, grace_s=1),),
            fields={"checkpoint.last.step": 42, "checkpoint.last.durable": True},
            conditions={"CheckpointDurable": ("True", "CheckpointDurable")},
        ),
    ),
    Row(
        id="all pods gone: the next attempt, charged to preemptions alone",
        job=moving(),
        seen=seen(gone=(ended(0, 75, termination=last_words(75, step=42)), ended(1, 75)), nodes=CORDONED),
        want=Want(
            phase="Pending",
            attempt=2,
            actions=(CreateWorkers(attempt=2, indices=(0, 1)),),
            events=("Yielded",),
            fields={
                "restarts.preemption": 1,
                "restarts.app": 0,
                "restarts.recent.0.reason": "Draining",
                "yieldRequest": None,
                "checkpoint.requestedAt": None,
                "failures.0": None,
            },
            messages={"event": "attempt 2 continues from the checkpoint of step 42"},
        ),
    ),
    Row(
        id="one move after the other without a step in between: a hold-off",
        job={
            **moving(),
            "status": {
                **moving()["status"],
                "restarts": restarts("preemption", 30, reason="Draining", steps=(42,)),
                "checkpoint": {"last": {"step": 42, "time": stamp(ago(60)), "durable": True}},
            },
        },
        seen=seen(gone=(ended(0, 75), ended(1, 75))),
        want=Want(phase="Restarting", fields={"nextAttemptTime": "2026-01-01T12:00:05Z"}),
    ),
    Row(
        id="a rank that crashes during the move is a failure as any other",
        job=moving(),
        seen=seen(ended(0, 1), ready(1), yielding=YieldState(attempt=1, acked_at=ago(9))),
        want=Want(
            phase="Restarting",
            events=("RankFailed",),
            fields={"restarts.app": 1, "restarts.preemption": 0, "yieldRequest": None},
        ),
    ),
    Row(
        id="a pod that was killed by the drain after its grace is no failure of the job's",
        job=moving(),
        seen=seen(gone=(ended(1, 137, deletion_at=ago(3), deletion_grace_s=60), ended(0, 75))),
        want=Want(
            phase="Pending",
            attempt=2,
            fields={"restarts.preemption": 1, "restarts.app": 0, "failures.0": None},
        ),
    ),
    Row(
        id="no answer within the grace: the pods are ended and the job moves all the same",
        job=moving(s_ago=76),
        seen=seen(ready(0), ready(1), yielding=YieldState(attempt=1, acked_at=ago(70))),
        want=Want(phase="Yielding", actions=(DeleteWorkers(attempt=1, grace_s=1),), events=("YieldTimeout",)),
    ),
    Row(
        id="ranks that never met are moved at once",
        job=job(status=status("Starting")),
        seen=seen(running(0), running(1), nodes=CORDONED),
        want=Want(
            phase="Yielding",
            actions=(DeleteWorkers(attempt=1, grace_s=1),),
            fields={"yieldRequest.joined": False},
        ),
    ),
    Row(
        id="where a pod came back to the node all the same, the same cordon does not move it again",
        job=job(status=status("Running", attempt=2, movedOff=["node-1"])),
        seen=seen(ready(0, 2), ready(1, 2), nodes=CORDONED),
        want=Want(phase="Running", events=(), fields={"movedOff": ["node-1"]}),
    ),
    Row(
        id="another node of the same job does",
        job=job(status=status("Running", attempt=2, movedOff=["node-0"])),
        seen=seen(
            ready(0, 2),
            ready(1, 2),
            nodes={**CORDONED, "node-0": NodeView(name="node-0", unschedulable=True)},
        ),
        want=Want(phase="Yielding", fields={"movedOff": ["node-0", "node-1"]}),
    ),
    Row(
        id="a node that is well again may be drained another time",
        job=job(status=status("Running", attempt=2, movedOff=["node-1", "node-7"])),
        seen=seen(ready(0, 2), ready(1, 2)),
        want=Want(phase="Running", fields={"movedOff": ["node-7"]}),
    ),
    Row(
        id="suspended during the move: the same request goes on, with its clock",
        job={**moving(), "spec": {**moving()["spec"], "suspend": True}},
        seen=seen(ready(0), ready(1), yielding=YieldState(attempt=1, acked_at=ago(9))),
        want=Want(
            phase="Suspending",
            actions=(),
            fields={"yieldRequest.reason": "Suspend", "yieldRequest.requestedAt": stamp(ago(10))},
            wake_in_s=65,
        ),
    ),
    Row(
        id="a suspended job is not moved",
        job=job(spec={"suspend": True}, status=status("Running")),
        seen=seen(ready(0), ready(1), nodes=CORDONED),
        want=Want(phase="Suspending", fields={"yieldRequest.reason": "Suspend"}),
    ),
]


def young(**stored: Any) -> dict[str, Any]:
    return job(status=status("Running", attemptStartTime=stamp(ago(20)), **stored))


KNOWN = Protection(attempt=1, exists=True)
BUDGET = [
    Row(
        id="an attempt without steps has nothing to lose yet",
        job=young(),
        seen=seen(ready(0), ready(1)),
        want=Want(actions=(), fields={"protectedAttempt": None}, wake_in_s=40),
    ),
    Row(
        id="with its first step it is protected; status says so first",
        job=young(),
        seen=seen(ready(0), ready(1), progress=progress(1)),
        want=Want(actions=(ProtectWorkers(attempt=1, workers=2),), fields={"protectedAttempt": 1}),
    ),
    Row(
        id="known to be protected: nothing to do",
        job=young(protectedAttempt=1),
        seen=seen(ready(0), ready(1), progress=progress(1), protection=KNOWN),
        want=Want(actions=()),
    ),
    Row(
        id="an operator that was restarted makes sure",
        job=young(protectedAttempt=1),
        seen=seen(ready(0), ready(1), progress=progress(1)),
        want=Want(actions=(ProtectWorkers(attempt=1, workers=2),)),
    ),
    Row(
        id="one worker needs no budget: its eviction is the request to stop",
        job=job(spec={"workers": 1}, status=status("Running", attemptStartTime=stamp(ago(900)))),
        seen=seen(ready(0), progress=progress(1)),
        want=Want(actions=(), fields={"protectedAttempt": None}),
    ),
    Row(
        id="nor does a job that may stay on a cordoned node: nothing else would move it",
        job=tolerating(operator="Exists"),
        seen=seen(ready(0), ready(1), progress=progress(1)),
        want=Want(actions=(), fields={"protectedAttempt": None}),
    ),
    Row(
        id="nor one with a worker on a node that it has moved off",
        job=young(movedOff=["node-1"]),
        seen=seen(ready(0), ready(1), progress=progress(1), nodes=CORDONED),
        want=Want(phase="Running", actions=(), fields={"protectedAttempt": None}),
    ),
    Row(
        id="another toleration changes nothing",
        job=tolerating(key="nvidia.com/gpu", operator="Exists"),
        seen=seen(ready(0), ready(1), progress=progress(1)),
        want=Want(actions=(ProtectWorkers(attempt=1, workers=2),), fields={"protectedAttempt": 1}),
    ),
    Row(
        id="nor one whose operator may not see nodes",
        job=young(),
        seen=seen(ready(0), ready(1), progress=progress(1), sees_nodes=False),
        want=Want(actions=(), fields={"protectedAttempt": None}),
    ),
    Row(
        id="kept while the ranks write their checkpoint",
        job={**moving(), "status": {**moving()["status"], "protectedAttempt": 1}},
        seen=seen(ready(0), ready(1), yielding=YieldState(attempt=1, acked_at=ago(9)), protection=KNOWN),
        want=Want(phase="Yielding", actions=(), fields={"protectedAttempt": 1}),
    ),
    Row(
        id="gone with the attempt",
        job=job(
            status=status("Restarting", protectedAttempt=1, nextAttemptTime=stamp(NOW.replace(minute=5)))
        ),
        seen=seen(protection=KNOWN),
        want=Want(actions=(UnprotectWorkers(attempt=1),), fields={"protectedAttempt": 1}),
    ),
    Row(
        id="forgotten once the API server said that it is gone",
        job=job(status=status("Completed", protectedAttempt=1, completionTime=stamp(ago(5)))),
        seen=seen(protection=replace(KNOWN, exists=False)),
        want=Want(actions=(), fields={"protectedAttempt": None}),
    ),
    Row(
        id="the budget of an earlier attempt goes before the next one gets its own",
        job=job(status=status("Running", attempt=2, protectedAttempt=1, attemptStartTime=stamp(ago(900)))),
        seen=seen(ready(0, 2), ready(1, 2), protection=KNOWN),
        want=Want(actions=(UnprotectWorkers(attempt=1),), fields={"protectedAttempt": 1}),
    ),
]


@pytest.mark.parametrize("row", MOVES, ids=lambda row: row.id)
def test_move(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", BUDGET, ids=lambda row: row.id)
def test_budget(row: Row) -> None:
    check(row)
