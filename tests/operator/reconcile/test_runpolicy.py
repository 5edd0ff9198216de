"""Table of `reconcile` for spec.runPolicy: what ends with a job, when, and the effect of edits of the policy
on a job that runs or has ended.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    Row,
    Want,
    ago,
    check,
    ended,
    going,
    job,
    ready,
    running,
    seen,
    stamp,
    status,
)
from zerotrain.operator.reconcile import DeleteJob, DeletePods, DeleteWorkers, PodView

pytestmark = pytest.mark.unit


def policy(**fields: Any) -> dict[str, Any]:
    return {"runPolicy": fields}


def finished(phase: str, seconds_ago: float = 100) -> dict[str, Any]:
    return status(phase, completionTime=stamp(ago(seconds_ago)))


def lingering(index: int, code: int, *, s_ago: float) -> PodView:
    """Return a worker that has ended in a pod in which another container runs on."""
    return ended(index, code, s_ago=s_ago, phase="Running")


BOTH_DELETED = (DeletePods(names_uids=(("gpt-1-0", "pod-1-0"), ("gpt-1-1", "pod-1-1")), grace_s=1),)


DEADLINE = [
    Row(
        id="no checkpoint is waited for: the ranks get a second",
        job=job(spec=policy(activeDeadlineSeconds=600, cleanPodPolicy="All"), status=status("Running")),
        seen=seen(ready(0), ready(1)),
        want=Want(phase="Failed", actions=(DeleteWorkers(attempt=1, grace_s=1),)),
    ),
    Row(
        id="cleanPodPolicy None does not keep ranks that wait for nobody",
        job=job(spec=policy(activeDeadlineSeconds=600, cleanPodPolicy="None"), status=status("Running")),
        seen=seen(ended(0, 0), ready(1)),
        want=Want(phase="Failed", actions=(DeletePods(names_uids=(("gpt-1-1", "pod-1-1"),), grace_s=1),)),
    ),
    Row(
        id="it covers the start, too",
        job=job(spec=policy(activeDeadlineSeconds=600), status=status("Pending")),
        seen=seen(running(0)),
        want=Want(phase="Failed", events=("DeadlineExceeded",)),
    ),
    Row(
        id="set below the time that the job has been active: over at once",
        job=job(spec=policy(activeDeadlineSeconds=1), status=status("Running")),
        seen=seen(ready(0), ready(1)),
        want=Want(phase="Failed", messages={"event": "active for more than 1 s"}),
    ),
    Row(
        id="taken away in time: the job goes on",
        job=job(status=status("Running", startTime=stamp(ago(10_000_000)))),
        seen=seen(ready(0), ready(1)),
        want=Want(phase="Running", actions=()),
    ),
    Row(
        id="a job that is just being suspended keeps its grace",
        job=job(
            spec={"suspend": True, **policy(activeDeadlineSeconds=600)},
            status=status("Suspending", checkpoint={"requestedAt": stamp(ago(1))}),
        ),
        seen=seen(ready(0), ready(1)),
        want=Want(phase="Suspending"),
    ),
    Row(
        id="a job that was suspended while no operator looked: its checkpoint, not the deadline",
        job=job(spec={"suspend": True, **policy(activeDeadlineSeconds=600)}, status=status("Running")),
        seen=seen(ready(0), ready(1)),
        want=Want(phase="Suspending", events=("CheckpointRequested",)),
    ),
    Row(
        id="nor between two attempts",
        job=job(spec={"suspend": True, **policy(activeDeadlineSeconds=600)}, status=status("Restarting")),
        seen=seen(),
        want=Want(phase="Suspended"),
    ),
    Row(
        id="a failure in the same pass is told as what it is: the deadline",
        job=job(spec=policy(activeDeadlineSeconds=600), status=status("Running")),
        seen=seen(ended(0, 1), ready(1)),
        want=Want(phase="Failed", conditions={"Failed": ("True", "DeadlineExceeded")}),
    ),
]

CLEANING = [
    Row(
        id="None keeps what runs beside a completed job",
        job=job(spec=policy(cleanPodPolicy="None"), status=finished("Completed")),
        seen=seen(ended(0, 0), running(1)),
        want=Want(actions=()),
    ),
    Row(
        id="Running ends what still runs",
        job=job(spec=policy(cleanPodPolicy="Running"), status=finished("Completed")),
        seen=seen(ended(0, 0), running(1)),
        want=Want(actions=(DeletePods(names_uids=(("gpt-1-1", "pod-1-1"),), grace_s=1),)),
    ),
    Row(
        id="All takes the pods of a failed job",
        job=job(spec=policy(cleanPodPolicy="All"), status=finished("Failed")),
        seen=seen(ended(0, 65), ready(1)),
        want=Want(actions=(DeleteWorkers(attempt=1, grace_s=1),)),
    ),
    *(
        Row(
            id=f"{phase}: a pod of an earlier attempt that shows up late goes, under any policy",
            job=job(spec=policy(cleanPodPolicy="None"), status={**finished(phase), "attempt": 2}),
            seen=seen(ended(0, 0, 2), ended(1, 0, 2), running(0, 1)),
            want=Want(actions=(DeleteWorkers(attempt=1, grace_s=1),)),
        )
        for phase in ("Completed", "Failed")
    ),
    Row(
        id="All takes what an earlier attempt left",
        job=job(spec=policy(cleanPodPolicy="All"), status={**finished("Completed"), "attempt": 2}),
        seen=seen(ended(0, 0, 2), ended(1, 0, 2), ended(0, 137, 1)),
        want=Want(actions=(DeleteWorkers(attempt=1, grace_s=1), DeleteWorkers(attempt=2, grace_s=1))),
    ),
    Row(
        id="a policy that is changed afterwards is followed",
        job=job(spec=policy(cleanPodPolicy="All"), status=finished("Completed", 100_000)),
        seen=seen(ended(0, 0), ended(1, 0)),
        want=Want(phase="Completed", actions=(DeleteWorkers(attempt=1, grace_s=1),)),
    ),
    Row(
        id="a pod that does not go is taken by force after the job's end, too",
        job=job(spec=policy(terminationTimeoutSeconds=30), status=finished("Failed")),
        seen=seen(ended(0, 65), going(1, grace_s=1, asked_s_ago=40)),
        want=Want(actions=(DeletePods(names_uids=(("gpt-1-1", "pod-1-1"),), grace_s=0),)),
    ),
]

LIVING = [
    Row(
        id="added after the end it counts from the end",
        job=job(spec=policy(ttlSecondsAfterFinished=60), status=finished("Completed", 100)),
        seen=seen(),
        want=Want(actions=(DeleteJob(),)),
    ),
    Row(
        id="taken away it is never",
        job=job(status=finished("Completed", 10_000_000)),
        seen=seen(),
        want=Want(phase="Completed", actions=(), wake_in_s=None, writes=None),
    ),
    Row(
        id="made longer it is later",
        job=job(spec=policy(ttlSecondsAfterFinished=130), status=finished("Failed", 100)),
        seen=seen(),
        want=Want(actions=(), wake_in_s=30),
    ),
    Row(
        id="a suspended job has not ended",
        job=job(spec={"suspend": True, **policy(ttlSecondsAfterFinished=0)}, status=status("Suspended")),
        seen=seen(),
        want=Want(phase="Suspended", actions=()),
    ),
    Row(
        id="suspending a job that has ended changes nothing",
        job=job(spec={"suspend": True}, status=finished("Completed")),
        seen=seen(ended(0, 0), ended(1, 0)),
        want=Want(phase="Completed", attempt=1, actions=(), events=()),
    ),
    Row(
        id="resuming a job that has failed starts no attempt",
        job=job(spec={"suspend": False}, status=finished("Failed")),
        seen=seen(),
        want=Want(phase="Failed", attempt=1, actions=(), events=()),
    ),
]


LINGERING = [
    Row(
        id="what runs beside the worker has time to end by itself",
        job=job(status=finished("Completed")),
        seen=seen(lingering(0, 0, s_ago=20), lingering(1, 0, s_ago=20)),
        want=Want(phase="Completed", actions=(), wake_in_s=40),
    ),
    Row(
        id="then its pod is ended, for it holds the devices",
        job=job(status=finished("Completed")),
        seen=seen(lingering(0, 0, s_ago=60), lingering(1, 0, s_ago=60)),
        want=Want(phase="Completed", actions=BOTH_DELETED),
    ),
    Row(
        id="also that of a failed job, whatever the policy says",
        job=job(spec=policy(cleanPodPolicy="None"), status=finished("Failed")),
        seen=seen(lingering(0, 64, s_ago=60), lingering(1, 1, s_ago=60)),
        want=Want(phase="Failed", actions=BOTH_DELETED),
    ),
    Row(
        id="the policy None leaves that of a completed job alone",
        job=job(spec=policy(cleanPodPolicy="None"), status=finished("Completed")),
        seen=seen(lingering(0, 0, s_ago=900), lingering(1, 0, s_ago=900)),
        want=Want(phase="Completed", actions=()),
    ),
]


@pytest.mark.parametrize("row", DEADLINE + CLEANING + LIVING + LINGERING, ids=lambda row: row.id)
def test_run_policy(row: Row) -> None:
    check(row)
