"""Table of `reconcile` when workers fail: the culprit, the restart budget that is charged, when the next
attempt comes, and when none does.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    ALL,
    NOW,
    Row,
    Want,
    ago,
    check,
    ended,
    going,
    job,
    last_words,
    pending,
    progress,
    ready,
    restarts,
    running,
    seen,
    stamp,
    status,
)
from zerotrain.contract.progress import Progress
from zerotrain.operator.reconcile import CreateWorkers, DeletePods, DeleteWorkers, PodView

pytestmark = pytest.mark.unit


END_ALL = (DeleteWorkers(attempt=1, grace_s=1),)


def failing(
    *pods: PodView,
    id: str,
    want: Want,
    spec: dict[str, Any] | None = None,
    gone: tuple[PodView, ...] = (),
    progress: Progress | None = None,
    **more: Any,
) -> Row:
    """Row of a running first attempt in which `pods` are seen."""
    stored = job(spec=spec, status=status("Running", **more))
    return Row(id=id, job=stored, seen=seen(*pods, gone=gone, progress=progress), want=want)


PERMANENT = [
    failing(
        ended(0, code),
        ready(1),
        id=f"exit code {code} is never retried",
        want=Want(
            phase="Failed",
            attempt=1,
            actions=(DeletePods(names_uids=(("gpt-1-1", "pod-1-1"),), grace_s=1),),
            events=("PermanentFailure",),
            conditions={"Failed": ("True", "PermanentFailure")},
            fields={"failures.0.exitCode": code, "restarts.total": 0},
        ),
    )
    for code in (64, 65, 66, 67, 68, 69, 83)
]

CAUSES = [
    failing(
        ended(1, 1, termination=last_words(1, rank=1, exception="ValueError: boom")),
        ended(0, 1, s_ago=3),
        id="a plain failure restarts all and charges the application",
        want=Want(
            phase="Restarting",
            attempt=1,
            actions=END_ALL,
            events=("RankFailed",),
            fields={
                "restarts.app": 1,
                "restarts.total": 1,
                "failures.0.rank": 1,
                "failures.0.pod": "gpt-1-1",
                "failures.0.node": "node-1",
                "failures.0.exitCode": 1,
                "failures.0.reason": "RankFailed",
                "failures.0.cause": "app",
                "nextAttemptTime": None,
            },
            messages={
                "event": "worker 1 (rank 1, pod gpt-1-1, node node-1): exit code 1 "
                "(the training program failed): ValueError: boom; attempt 2"
            },
        ),
    ),
    failing(
        ended(0, 137, exit_reason="OOMKilled"),
        ready(1),
        id="out of memory",
        want=Want(
            phase="Restarting",
            actions=END_ALL,
            fields={"restarts.app": 1, "failures.0.reason": "OutOfMemory"},
        ),
    ),
    failing(
        ended(0, 137),
        ready(1),
        id="SIGKILL without a reason of the cluster's",
        want=Want(phase="Restarting", fields={"restarts.app": 1, "failures.0.reason": "Killed"}),
    ),
    failing(
        ended(0, 82),
        ended(1, 82),
        id="a rendezvous that never completed is outside the application's budget",
        spec={"failurePolicy": {"maxRestarts": 0}},
        want=Want(
            phase="Restarting",
            fields={"restarts.infra": 1, "restarts.app": 0, "failures.0.reason": "RendezvousTimeout"},
        ),
    ),
    failing(
        ended(0, 84),
        ready(1),
        id="damaged spill gets one more attempt",
        want=Want(phase="Restarting", fields={"restarts.infra": 1, "failures.0.reason": "SpillIntegrity"}),
    ),
    failing(
        ended(0, 84),
        ready(1),
        id="damaged spill a second time fails the job",
        restarts=restarts("infra", 7200, reason="SpillIntegrity"),
        want=Want(phase="Failed", messages={"event": "SpillIntegrity happened a second time"}),
    ),
    failing(
        ended(0, 137, disruption="PreemptionByScheduler"),
        ready(1),
        id="preempted",
        want=Want(phase="Restarting", fields={"restarts.preemption": 1, "failures.0.reason": "Preempted"}),
    ),
    failing(
        ended(0, 137, disruption="DeletionByTaintManager"),
        ready(1),
        id="node lost",
        want=Want(phase="Restarting", fields={"restarts.infra": 1, "failures.0.reason": "NodeLost"}),
    ),
    *(
        failing(
            ended(0, 137, pod_reason="Evicted", pod_message="node was low on memory", disruption=said),
            ready(1),
            id=f"evicted by the kubelet, which says {said} beside it",
            want=Want(
                phase="Restarting",
                fields={"restarts.infra": 1, "restarts.preemption": 0, "failures.0.reason": "Evicted"},
                messages={"event": "node was low on memory"},
            ),
        )
        for said in (None, "TerminationByKubelet")
    ),
    failing(
        ended(0, 137, pod_reason="Evicted", disruption="TerminationByKubelet"),
        ready(1),
        id="a job that fills the memory of its nodes does not go on for ever",
        restarts=restarts("infra", *range(3000, 0, -150), reason="Evicted"),
        want=Want(phase="Failed", events=("RestartsExhausted",)),
    ),
    failing(
        pending(0, phase="Failed", pod_reason="UnexpectedAdmissionError", ended_seen_at=ago(1)),
        ready(1),
        id="refused by the node before it ran",
        want=Want(phase="Restarting", fields={"restarts.infra": 1, "failures.0.reason": "PodRejected"}),
    ),
    failing(
        ready(1),
        id="a pod that was deleted without a trace is infrastructure",
        want=Want(
            phase="Restarting",
            actions=END_ALL,
            fields={"restarts.infra": 1, "failures.0.reason": "PodLost", "failures.0.rank": 0},
        ),
    ),
    failing(
        ready(1),
        id="a pod whose deletion this operator saw, killed on the way",
        gone=(going(0),),
        want=Want(
            phase="Restarting",
            fields={"restarts.infra": 1, "failures.0.reason": "PodLost", "failures.0.node": "node-0"},
        ),
    ),
    failing(
        ended(0, 137, deletion_at=ago(0)),
        ready(1),
        id="killed at the end of somebody's deletion grace",
        want=Want(phase="Restarting", fields={"restarts.infra": 1, "failures.0.reason": "PodLost"}),
    ),
    failing(
        going(0, asked_s_ago=200, grace_s=60),
        ready(1),
        id="a pod that hangs in Terminating past its grace and the timeout is lost and removed by force",
        want=Want(
            phase="Restarting",
            actions=(
                DeleteWorkers(attempt=1, grace_s=1),
                DeletePods(names_uids=(("gpt-1-0", "pod-1-0"),), grace_s=0),
            ),
            messages={"event": "its node does not finish the deletion"},
        ),
    ),
]

BUDGETS = [
    failing(
        ended(0, 137),
        ready(1),
        id="the last allowed restart",
        spec={"failurePolicy": {"maxRestarts": 2}},
        restarts=restarts("app", 100),
        want=Want(phase="Restarting", fields={"restarts.app": 2}),
    ),
    failing(
        ended(0, 137),
        ready(1),
        id="one restart too many",
        spec={"failurePolicy": {"maxRestarts": 2}},
        restarts=restarts("app", 200, 100),
        want=Want(
            phase="Failed",
            events=("RestartsExhausted",),
            fields={"restarts.app": 2},
            messages={"event": "2 restarts by app within 3600 s, 2 are allowed"},
        ),
    ),
    failing(
        ended(0, 137),
        ready(1),
        id="restarts that left the window are forgotten",
        spec={"failurePolicy": {"maxRestarts": 2, "windowSeconds": 150}},
        restarts=restarts("app", 200, 100),
        progress=progress(30),
        want=Want(
            phase="Restarting",
            fields={"restarts.app": 3, "restarts.recent.1.time": stamp(NOW), "restarts.recent.2": None},
        ),
    ),
    failing(
        ended(0, 137, disruption="PreemptionByScheduler"),
        ready(1),
        id="preemptions are without limit",
        spec={"failurePolicy": {"maxRestarts": 0}},
        restarts=restarts("preemption", *range(100, 50, -1)),
        want=Want(phase="Restarting", fields={"restarts.preemption": 51}),
    ),
    failing(
        ready(1),
        id="lost pods do not charge the application",
        spec={"failurePolicy": {"maxRestarts": 1}},
        restarts=restarts("infra", 300, 200, 100),
        want=Want(phase="Restarting", fields={"restarts.infra": 4, "restarts.app": 0}),
    ),
    failing(
        ready(1),
        id="but infrastructure is not without limit",
        restarts=restarts("infra", *range(400, 200, -10)),
        want=Want(phase="Failed", messages={"event": "20 restarts by infra"}),
    ),
    failing(
        ready(1),
        id="hold-offs do not carry restarts without a step out of the window",
        restarts=restarts("infra", *range(8400, 400, -400), steps=[0] * 20),
        want=Want(phase="Failed", messages={"event": "20 restarts by infra"}),
    ),
    failing(
        ready(1),
        id="nor when steps are known, however long ago",
        restarts=restarts("infra", *range(200_000, 0, -10_000), steps=[7] * 20),
        progress=progress(7),
        want=Want(phase="Failed", messages={"event": "until a step is gained"}),
    ),
    failing(
        ready(1),
        id="a restart without a step is kept for the count",
        restarts=restarts("infra", 7200, steps=[7]),
        progress=progress(7),
        want=Want(phase="Restarting", fields={"restarts.recent.0.step": 7, "restarts.recent.1.step": 7}),
    ),
    failing(
        ready(1),
        id="a program without steps that lasted for long is not charged for old restarts",
        restarts=restarts("infra", *range(200_000, 0, -10_000), steps=[0] * 20),
        want=Want(phase="Restarting", fields={"restarts.recent.1": None}),
    ),
    failing(
        ended(0, 137),
        ready(1),
        id="an attempt that gained steps is followed at once",
        restarts=restarts("app", 300, steps=[10]),
        progress=progress(20),
        want=Want(phase="Restarting", fields={"nextAttemptTime": None}),
    ),
    failing(
        ended(0, 137),
        ready(1),
        id="attempts without a step are held off, twice as long each time",
        restarts=restarts("app", 300, 200, 100, steps=[20, 20, 20]),
        progress=progress(20),
        want=Want(
            phase="Restarting",
            fields={"nextAttemptTime": "2026-01-01T12:00:20Z"},
            messages={"event": "in 20 s"},
        ),
    ),
]

RESTARTING = [
    Row(
        id="no pod of the next attempt while one of the last is left",
        job=job(status=status("Restarting")),
        seen=seen(going(0, grace_s=1)),
        want=Want(phase="Restarting", attempt=1, actions=()),
    ),
    Row(
        id="somebody's long grace is cut short",
        job=job(status=status("Restarting")),
        seen=seen(going(0, grace_s=60), ended(1, 137)),
        want=Want(actions=END_ALL),
    ),
    Row(
        id="all gone: the next attempt",
        job=job(status=status("Restarting")),
        seen=seen(gone=(ended(0, 137), ended(1, 1))),
        want=Want(phase="Pending", attempt=2, actions=(CreateWorkers(attempt=2, indices=ALL),)),
    ),
    Row(
        id="all gone but held off",
        job=job(status=status("Restarting", nextAttemptTime="2026-01-01T12:00:05Z")),
        seen=seen(),
        want=Want(
            phase="Restarting",
            attempt=1,
            actions=(),
            wake_in_s=5,
            conditions={"Reconciling": ("True", "BackOff")},
        ),
    ),
    Row(
        id="hold-off over",
        job=job(status=status("Restarting", nextAttemptTime="2026-01-01T12:00:00Z")),
        seen=seen(),
        want=Want(attempt=2, fields={"nextAttemptTime": None}),
    ),
    Row(
        id="a pod that does not go is removed by force after grace and timeout",
        job=job(spec={"runPolicy": {"terminationTimeoutSeconds": 30}}, status=status("Restarting")),
        seen=seen(going(0, grace_s=1, asked_s_ago=31), going(1, grace_s=1, asked_s_ago=10)),
        want=Want(
            phase="Restarting",
            actions=(DeletePods(names_uids=(("gpt-1-0", "pod-1-0"),), grace_s=0),),
            wake_in_s=21,
        ),
    ),
    Row(
        id="the failure is not charged again while the pods go",
        job=job(status=status("Restarting", restarts=restarts("app", 1))),
        seen=seen(ended(0, 137, deletion_at=ago(0), deletion_grace_s=1), going(1, grace_s=1)),
        want=Want(phase="Restarting", events=(), fields={"restarts.app": 1}),
    ),
    Row(
        id="the next attempt takes no notice of the last one's failure",
        job=job(status=status("Pending", attempt=2, podsCreated=False, restarts=restarts("app", 1))),
        seen=seen(running(0, 2), gone=(ended(0, 137), ended(1, 1))),
        want=Want(
            phase="Pending",
            attempt=2,
            actions=(CreateWorkers(attempt=2, indices=(1,)),),
            fields={"restarts.app": 1},
        ),
    ),
    Row(
        id="a created pod of a new attempt that vanished is lost, not made again under its name",
        job=job(status=status("Pending", attempt=2, podsCreated=False)),
        seen=seen(running(0, 2), gone=(pending(1, 2),)),
        want=Want(phase="Restarting", attempt=2, actions=(DeleteWorkers(attempt=2, grace_s=1),)),
    ),
    Row(
        id="an operator that just started gives a missing pod's peers time to yield",
        job=job(status=status("Running")),
        seen=seen(ready(1), synced_at=ago(0.5)),
        want=Want(phase="Running", actions=(), wake_in_s=1.5),
    ),
]


@pytest.mark.parametrize("row", PERMANENT + CAUSES, ids=lambda row: row.id)
def test_causes(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", BUDGETS, ids=lambda row: row.id)
def test_budgets(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", RESTARTING, ids=lambda row: row.id)
def test_between_attempts(row: Row) -> None:
    check(row)
