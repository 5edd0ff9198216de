"""Table of `reconcile` for suspend and resume, and for ranks that yield without a request of the job."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

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
    ready,
    restarts,
    running,
    seen,
    stamp,
    status,
)
from zerotrain.operator.reconcile import (
    CreateWorkers,
    DeletePods,
    DeleteWorkers,
    RequestYield,
    YieldState,
)

pytestmark = pytest.mark.unit


SUSPENDED = {"suspend": True}
YIELD = RequestYield(attempt=1, pod="gpt-1-0", pod_ip="10.0.0.0")
SIGTERM = DeleteWorkers(attempt=1, grace_s=None, ended=False)
"""Deletion of the pods that still run: an ended pod stays until its termination message is in the status."""

ACKED = YieldState(attempt=1, acked_at=ago(1))


def asked(seconds: float) -> dict[str, object]:
    """Return the status of a job whose checkpoint was requested so many seconds ago."""
    return status("Suspending", checkpoint={"requestedAt": stamp(ago(seconds))})


SUSPEND = [
    Row(
        id="a job born suspended gets no attempt and no object",
        job=job(spec=SUSPENDED),
        seen=seen(),
        want=Want(
            phase="Suspended",
            attempt=0,
            actions=(),
            events=("Suspended",),
            conditions={"Suspended": ("True", "Suspended"), "Reconciling": ("False", "Suspended")},
        ),
    ),
    Row(
        id="running: the checkpoint is requested, stored as such, and rank 0 is asked",
        job=job(spec=SUSPENDED, status=status("Running")),
        seen=seen(ready(0), ready(1)),
        want=Want(
            phase="Suspending",
            attempt=1,
            actions=(YIELD,),
            events=("CheckpointRequested",),
            fields={"checkpoint.requestedAt": stamp(NOW)},
            conditions={
                "CheckpointDurable": ("False", "CheckpointRequested"),
                "Reconciling": ("True", "CheckpointRequested"),
            },
            wake_in_s=2,
        ),
    ),
    Row(
        id="asked again until worker 0 answers",
        job=job(spec=SUSPENDED, status=asked(4)),
        seen=seen(ready(0), ready(1), yielding=YieldState(attempt=1, error="timeout")),
        want=Want(phase="Suspending", actions=(YIELD,)),
    ),
    Row(
        id="refused: SIGTERM at once",
        job=job(spec=SUSPENDED, status=asked(1)),
        seen=seen(ready(0), ready(1), yielding=YieldState(attempt=1, error="401", refused=True)),
        want=Want(phase="Suspending", actions=(SIGTERM,)),
    ),
    Row(
        id="an answer for an earlier attempt does not count",
        job=job(spec=SUSPENDED, status=asked(4)),
        seen=seen(ready(0), ready(1), yielding=replace(ACKED, attempt=0)),
        want=Want(actions=(YIELD,)),
    ),
    Row(
        id="answered: wait for the checkpoint, at most the grace",
        job=job(spec=SUSPENDED, status=asked(4)),
        seen=seen(ready(0), ready(1), yielding=ACKED),
        want=Want(phase="Suspending", actions=(), wake_in_s=71),
    ),
    Row(
        id="never answered: SIGTERM asks for the same checkpoint, with the pods' own grace",
        job=job(spec=SUSPENDED, status=asked(11)),
        seen=seen(ready(0), ready(1)),
        want=Want(phase="Suspending", actions=(SIGTERM,)),
    ),
    Row(
        id="worker 0 is going: another one is asked",
        job=job(spec=SUSPENDED, status=asked(0)),
        seen=seen(going(0), ready(1)),
        want=Want(actions=(RequestYield(attempt=1, pod="gpt-1-1", pod_ip="10.0.0.1"),)),
    ),
    Row(
        id="nobody runs who could be asked: SIGTERM at once",
        job=job(spec=SUSPENDED, status=asked(0)),
        seen=seen(going(0), pending(1)),
        want=Want(actions=(SIGTERM,)),
    ),
    Row(
        id="ranks that never met have nothing to save: their pods are ended at once",
        job=job(spec=SUSPENDED, status=status("Starting")),
        seen=seen(running(0), running(1)),
        want=Want(phase="Suspending", actions=(DeleteWorkers(attempt=1, grace_s=1),)),
    ),
    Row(
        id="ranks that met while no operator looked are asked all the same",
        job=job(spec=SUSPENDED, status=status("Starting")),
        seen=seen(ready(0), running(1)),
        want=Want(phase="Suspending", actions=(YIELD,)),
    ),
    Row(
        id="a program of the user's own: every worker is asked, since their ranks may not tell each other",
        job=job(spec={**SUSPENDED, "command": ["python", "own.py"]}, status=status("Running")),
        seen=seen(ready(0), ready(1)),
        want=Want(actions=(replace(YIELD, others=(("gpt-1-1", "10.0.0.1"),)),)),
    ),
    Row(
        id="under SIGTERM: wait",
        job=job(spec=SUSPENDED, status=asked(12)),
        seen=seen(going(0), going(1)),
        want=Want(phase="Suspending", actions=()),
    ),
    Row(
        id="one rank yielded, the other writes still",
        job=job(spec=SUSPENDED, status=asked(12)),
        seen=seen(ended(0, 75), ready(1), yielding=ACKED),
        want=Want(phase="Suspending", actions=()),
    ),
    Row(
        id="all yielded: the checkpoint is in status before the pods go",
        job=job(spec=SUSPENDED, status=asked(12)),
        seen=seen(ended(0, 75, termination=last_words(75, step=42)), ended(1, 75), yielding=ACKED),
        want=Want(
            phase="Suspending",
            actions=(DeleteWorkers(attempt=1, grace_s=1),),
            fields={"checkpoint.last.step": 42, "checkpoint.last.durable": True},
            conditions={"CheckpointDurable": ("True", "CheckpointDurable")},
        ),
    ),
    Row(
        id="a checkpoint of the same second as the last periodic one is the newer one",
        job=job(
            spec=SUSPENDED,
            status=status(
                "Suspending", checkpoint={"last": {"step": 40, "time": stamp(ago(3)), "durable": True}}
            ),
        ),
        seen=seen(ended(0, 75, termination=last_words(75, step=42)), ended(1, 75), yielding=ACKED),
        want=Want(fields={"checkpoint.last.step": 42}),
    ),
    Row(
        id="all pods gone",
        job=job(
            spec=SUSPENDED,
            status=status(
                "Suspending",
                checkpoint={"last": {"step": 42, "time": stamp(ago(3))}, "requestedAt": stamp(ago(12))},
            ),
        ),
        seen=seen(gone=(ended(0, 75), ended(1, 75))),
        want=Want(
            phase="Suspended",
            attempt=1,
            actions=(),
            events=("Suspended",),
            fields={"checkpoint.requestedAt": None, "startTime": None, "restarts.total": 0},
            messages={"Suspended": "resumes from step 42"},
        ),
    ),
    Row(
        id="all pods gone, and the last steps with them",
        job=job(
            spec=SUSPENDED,
            status=status(
                "Suspending",
                progress={"attempt": 1, "step": 90},
                checkpoint={"last": {"step": 20, "time": stamp(ago(500))}, "requestedAt": stamp(ago(70))},
            ),
        ),
        seen=seen(gone=(ended(0, 137), ended(1, 137))),
        want=Want(
            phase="Suspended",
            events=("Suspended",),
            conditions={"CheckpointDurable": ("False", "CheckpointOutdated")},
            messages={
                "CheckpointDurable": "the job was at step 90, the newest is step 20",
                "event": "the newest checkpoint is step 20, the job was at step 90",
            },
        ),
    ),
    Row(
        id="a job that waits suspended says so in every later pass",
        job=job(
            spec=SUSPENDED,
            status=status(
                "Suspended",
                progress={"attempt": 1, "step": 90},
                checkpoint={"last": {"step": 20, "time": stamp(ago(500))}},
            ),
        ),
        seen=seen(),
        want=Want(conditions={"CheckpointDurable": ("False", "CheckpointOutdated")}),
    ),
    Row(
        id="the grace is over: the pods are ended, with a warning",
        job=job(spec=SUSPENDED, status=asked(76)),
        seen=seen(ready(0), ready(1), yielding=replace(ACKED, acked_at=ago(75))),
        want=Want(
            actions=(DeleteWorkers(attempt=1, grace_s=1),),
            events=("YieldTimeout",),
            messages={"event": "gracePeriodSeconds"},
        ),
    ),
    *(
        Row(
            id=f"an operator that was away for longer than the grace: {name}",
            job=job(spec=SUSPENDED, status=asked(600)),
            seen=observed,
            want=Want(phase="Suspending", actions=actions, events=events, wake_in_s=wake_in_s),
        )
        for name, observed, actions, events, wake_in_s in (
            ("nobody was asked", seen(ready(0), ready(1)), (SIGTERM,), (), None),
            ("one was told", seen(going(0, asked_s_ago=100), ready(1)), (SIGTERM,), (), None),
            (
                "told a moment ago, the grace counts from there",
                seen(going(0), going(1, asked_s_ago=2)),
                (),
                (),
                65,
            ),
            (
                "acked a moment ago",
                seen(ready(0), ready(1), yielding=ACKED),
                (),
                (),
                64,
            ),
            (
                "told long ago by somebody with more patience",
                seen(*(going(index, grace_s=3600, asked_s_ago=66) for index in ALL)),
                (DeleteWorkers(attempt=1, grace_s=1),),
                ("YieldTimeout",),
                None,
            ),
        )
    ),
    Row(
        id="pods that never started have nothing to save",
        job=job(spec=SUSPENDED, status=status("Pending")),
        seen=seen(pending(0), pending(1)),
        want=Want(phase="Suspending", actions=(DeleteWorkers(attempt=1, grace_s=1),)),
    ),
    Row(
        id="a plain failure while suspending is recorded, costs nothing, and does not restart",
        job=job(spec=SUSPENDED, status=asked(5)),
        seen=seen(ended(0, 1), ready(1), yielding=ACKED),
        want=Want(
            phase="Suspending",
            actions=(DeleteWorkers(attempt=1, grace_s=1),),
            fields={"failures.0.exitCode": 1, "failures.0.cause": None, "restarts.total": 0},
        ),
    ),
    Row(
        id="a permanent failure while suspending fails the job",
        job=job(spec=SUSPENDED, status=asked(5)),
        seen=seen(ended(0, 66), ready(1), yielding=ACKED),
        want=Want(phase="Failed", conditions={"Failed": ("True", "PermanentFailure")}),
    ),
    Row(
        id="a job that finishes instead of yielding is complete",
        job=job(spec=SUSPENDED, status=asked(5)),
        seen=seen(ended(0, 0), ended(1, 0), yielding=ACKED),
        want=Want(phase="Completed"),
    ),
    Row(
        id="suspended between two attempts: no further attempt, no checkpoint to wait for",
        job=job(
            spec=SUSPENDED, status=status("Restarting", nextAttemptTime=stamp(NOW + timedelta(seconds=60)))
        ),
        seen=seen(),
        want=Want(phase="Suspended", attempt=1, actions=(), fields={"nextAttemptTime": None}),
    ),
    Row(
        id="a pod that hangs in Terminating does not hold up the suspension for ever",
        job=job(spec=SUSPENDED, status=asked(400)),
        seen=seen(going(0, grace_s=60, asked_s_ago=300)),
        want=Want(
            phase="Suspending",
            actions=(
                DeleteWorkers(attempt=1, grace_s=1),
                DeletePods(names_uids=(("gpt-1-0", "pod-1-0"),), grace_s=0),
            ),
        ),
    ),
    Row(
        id="the deadline does not run while suspended",
        job=job(
            spec={**SUSPENDED, "runPolicy": {"activeDeadlineSeconds": 1}},
            status={"phase": "Suspended", "attempt": 1},
        ),
        seen=seen(),
        want=Want(phase="Suspended", actions=()),
    ),
]

RESUME = [
    Row(
        id="resumed: exactly one attempt more, and a fresh deadline",
        job=job(status={"phase": "Suspended", "attempt": 1, "podsCreated": True}),
        seen=seen(gone=(ended(0, 75), ended(1, 75))),
        want=Want(
            phase="Pending",
            attempt=2,
            actions=(CreateWorkers(attempt=2, indices=ALL),),
            events=("Resumed",),
            fields={"podsCreated": False, "startTime": None},
            conditions={"Suspended": None},
        ),
    ),
    Row(
        id="a second pass over the resumed job does not count up again",
        job=job(status=status("Pending", attempt=2, podsCreated=False)),
        seen=seen(pending(0, 2), pending(1, 2)),
        want=Want(attempt=2, actions=()),
    ),
    Row(
        id="resumed while the pods still yield: first the end, then the next attempt",
        job=job(status=asked(5)),
        seen=seen(ended(0, 75), ready(1), yielding=ACKED),
        want=Want(phase="Suspending", attempt=1, actions=()),
    ),
    Row(
        id="pods left from before do not share the name space of the resumed attempt",
        job=job(status={"phase": "Suspended", "attempt": 1}),
        seen=seen(ended(0, 75)),
        want=Want(phase="Suspended", attempt=1, actions=(DeleteWorkers(attempt=1, grace_s=1),)),
    ),
    Row(
        id="a job born suspended starts with attempt 1",
        job=job(status={"phase": "Suspended", "attempt": 0}),
        seen=seen(),
        want=Want(attempt=1, actions=(CreateWorkers(attempt=1, indices=ALL),)),
    ),
]

UNASKED = [
    Row(
        id="a drained worker makes all ranks yield: wait for the others",
        job=job(status=status("Running")),
        seen=seen(ended(0, 75, s_ago=1), going(1)),
        want=Want(phase="Running", actions=(), wake_in_s=64),
    ),
    Row(
        id="all yielded: not a failure, the next attempt follows",
        job=job(status=status("Running")),
        seen=seen(ended(0, 75, termination=last_words(75, step=30)), ended(1, 75)),
        want=Want(
            phase="Restarting",
            actions=(DeleteWorkers(attempt=1, grace_s=1),),
            events=("Yielded",),
            fields={
                "restarts.preemption": 1,
                "restarts.app": 0,
                "failures.0": None,
                "checkpoint.last.step": 30,
            },
            messages={"event": "attempt 2 continues from the checkpoint of step 30"},
        ),
    ),
    Row(
        id="the drained pod is gone, its peer yielded",
        job=job(status=status("Running")),
        seen=seen(ended(1, 75), gone=(going(0),)),
        want=Want(
            phase="Restarting", events=("Yielded",), fields={"restarts.preemption": 1, "restarts.infra": 0}
        ),
    ),
    *(
        Row(
            id=f"a node that puts its pod out ({reason}) does not undo the yield",
            job=job(status=status("Running")),
            seen=seen(ended(0, 75, s_ago=1, pod_reason=reason, disruption="TerminationByKubelet"), ready(1)),
            want=Want(phase="Running", actions=(), events=()),
        )
        for reason in ("Terminated", "Evicted")
    ),
    Row(
        id="all yielded on nodes that shut down: a preemption, whatever the pods' reason",
        job=job(status=status("Running")),
        seen=seen(ended(0, 75, pod_reason="Evicted"), ended(1, 75, pod_reason="Terminated")),
        want=Want(
            phase="Restarting", events=("Yielded",), fields={"restarts.preemption": 1, "restarts.infra": 0}
        ),
    ),
    Row(
        id="the drained pod yielded and is gone, its peer writes still",
        job=job(status=status("Running")),
        seen=seen(ready(1), gone=(ended(0, 75, s_ago=1),)),
        want=Want(phase="Running", actions=()),
    ),
    Row(
        id="a peer that never yields is ended after the grace",
        job=job(status=status("Running")),
        seen=seen(ended(0, 75, s_ago=70), ready(1)),
        want=Want(phase="Restarting", actions=(DeleteWorkers(attempt=1, grace_s=1),)),
    ),
    Row(
        id="a yield that nobody asked for is a failure once no step is gained",
        job=job(status=status("Running", restarts=restarts("preemption", 60, reason="Yielded", steps=[30]))),
        seen=seen(ended(0, 75, termination=last_words(75, step=30)), ended(1, 75)),
        want=Want(
            phase="Restarting",
            events=("Yielded",),
            fields={
                "restarts.app": 1,
                "restarts.preemption": 1,
                "failures.0.exitCode": 75,
                "failures.0.cause": "app",
            },
            messages={
                "event": "ended with code 75 (yielded) although it was not asked to stop, and no step was"
            },
        ),
    ),
    Row(
        id="and ends the job in the end",
        job=job(
            spec={"failurePolicy": {"maxRestarts": 2}},
            status=status("Running", restarts=restarts("app", 900, 300, reason="Yielded", steps=[30, 30])),
        ),
        seen=seen(ended(0, 75, termination=last_words(75, step=30)), ended(1, 75)),
        want=Want(phase="Failed", conditions={"Failed": ("True", "RestartsExhausted")}),
    ),
    *(
        Row(
            id=f"but not where {name}",
            job=job(status=status("Running", restarts=restarts("preemption", 60, steps=[30]))),
            seen=seen(ended(0, 75, termination=last_words(75, step=step)), *more.pods, gone=more.gone),
            want=Want(phase="Restarting", events=("Yielded",), fields={"restarts.preemption": 2}),
        )
        for name, step, more in (
            ("a step was gained", 31, seen(ended(1, 75))),
            ("a worker was deleted", 30, replace(seen(), gone=(ended(1, 75),))),
            ("a worker is being deleted", 30, seen(replace(ended(1, 75), deletion_at=ago(1)))),
            ("a worker was disrupted", 30, seen(ended(1, 75, disruption="EvictionByEvictionAPI"))),
            ("a node shut down", 30, seen(ended(1, 75, pod_reason="Terminated"))),
        )
    ),
    Row(
        id="a peer that failed instead of yielding is a failure",
        job=job(status=status("Running")),
        seen=seen(ended(0, 75), ended(1, 1)),
        want=Want(phase="Restarting", events=("RankFailed",), fields={"restarts.app": 1}),
    ),
]


@pytest.mark.parametrize("row", SUSPEND, ids=lambda row: row.id)
def test_suspend(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", RESUME, ids=lambda row: row.id)
def test_resume(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", UNASKED, ids=lambda row: row.id)
def test_yield_without_a_request(row: Row) -> None:
    check(row)
