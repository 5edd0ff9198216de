"""Table of `reconcile` for the pod that verifies the newest checkpoint of a completed job."""

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
    job,
    last_words,
    pending,
    running,
    seen,
    settled,
    stamp,
    status,
)
from zerotrain.contract.progress import CheckpointProgress, Termination
from zerotrain.operator.reconcile import (
    AskQueue,
    CreateVerification,
    DeleteJob,
    DeletePods,
    DeleteWorkers,
    PodView,
    Problem,
    reconcile,
)
from zerotrain.operator.reconcile.observe import ClusterApis, QueueView
from zerotrain.operator.reconcile.plan import QueueStep

pytestmark = pytest.mark.unit


NAME = "step-0000000100-attempt-1"
POD = "gpt-1-verify-1"
VOLUME = {"persistentVolumeClaim": {"claimName": "ckpt"}}
DONE = (ended(0, 0), ended(1, 0))
CREATE = CreateVerification(pod=POD, checkpoint=NAME, limit_s=7200)
SAVED = CheckpointProgress(step=100, path=f"/checkpoints/gpt/{NAME}", time=ago(3).timestamp())
KUEUE = ClusterApis(at=ago(1), kueue="kueue.x-k8s.io/v1beta2")
QUOTA = QueueView(exists=True, workers=2, queue="team-a", admitted=True, holds_quota=True, pods_ready=True)
NFS = {"nfs": {"server": "filer", "path": "/export"}}


def verifying(**spec: Any) -> dict[str, Any]:
    return {"checkpoint": {"volume": VOLUME, "verify": "OnCompletion"}, **spec}


def completed(path: str = f"/checkpoints/gpt/{NAME}", **verification: Any) -> dict[str, Any]:
    """Return a completed job's status; with arguments, the record of a verification that began a minute
    ago.
    """
    last = {"step": 100, "path": path, "time": stamp(ago(70)), "durable": True}
    checkpoint: dict[str, Any] = {"last": last}
    if verification:
        begun = {"step": 100, "checkpoint": NAME, "pod": POD, "tries": 1, "startTime": stamp(ago(60))}
        checkpoint["verification"] = {"state": "Running", **begun, **verification}
    return status("Completed", completionTime=stamp(ago(60)), checkpoint=checkpoint)


def helper(pod: PodView, name: str = POD, **more: Any) -> PodView:
    fields = {"name": name, "uid": "pod-v", "attempt": 0, "index": 0, "helper": "verify", **more}
    return replace(pod, **fields)


def said(line: str) -> Termination:
    return Termination(attempt=0, code=-1, last_line=line)


BEGIN = [
    Row(
        id="the record is in status before the pod is made",
        job=job(spec=verifying(), status=completed()),
        seen=seen(*DONE),
        want=Want(
            actions=(CREATE,),
            events=(),
            fields={
                "checkpoint.verification.state": "Running",
                "checkpoint.verification.pod": POD,
                "checkpoint.verification.tries": 1,
                "checkpoint.verification.step": 100,
            },
            writes=True,
            wake_in_s=7200,
        ),
    ),
    Row(
        id="in the pass that completes the job",
        job=job(spec=verifying(), status=status("Running")),
        seen=seen(
            ended(0, 0, termination=replace(last_words(0), step=100, checkpoint=SAVED)),
            ended(1, 0),
        ),
        want=Want(
            phase="Completed",
            actions=(CREATE,),
            events=("Completed",),
        ),
    ),
    Row(
        id="the pod may be refused, and what ends the pass then comes after the queue's quota",
        job=job(spec=verifying(scheduling={"queueName": "team-a"}), status=completed()),
        seen=seen(*DONE, apis=KUEUE, queue=QUOTA),
        want=Want(
            actions=(AskQueue(step=QueueStep.FINISH, workers=2, message="the job is Completed"), CREATE),
        ),
    ),
    Row(
        id="a restart between the record and the pod makes that pod",
        job=job(spec=verifying(), status=completed(tries=1)),
        seen=seen(*DONE),
        want=Want(actions=(CREATE,), events=(), writes=None),
    ),
    Row(
        id="nothing is wanted: nothing is made",
        job=job(status=completed()),
        seen=seen(*DONE),
        want=Want(actions=(), fields={"checkpoint.verification": None}),
    ),
    Row(
        id="Never makes nothing",
        job=job(spec={"checkpoint": {"volume": VOLUME, "verify": "Never"}}, status=completed()),
        seen=seen(*DONE),
        want=Want(actions=(), fields={"checkpoint.verification": None}),
    ),
    Row(
        id="a failed job is not verified",
        job=job(spec=verifying(), status={**completed(), "phase": "Failed"}),
        seen=seen(*DONE),
        want=Want(actions=(), fields={"checkpoint.verification": None}),
    ),
    Row(
        id="a job that left no checkpoint has nothing to verify",
        job=job(spec=verifying(), status=status("Completed")),
        seen=seen(*DONE),
        want=Want(actions=(), fields={"checkpoint.verification": None}),
    ),
    Row(
        id="what the workers reported is no name: no program is given it",
        job=job(spec=verifying(), status=completed(path="/checkpoints/gpt/--help; x")),
        seen=seen(*DONE),
        want=Want(
            actions=(),
            events=("VerificationFailed",),
            fields={"checkpoint.verification.state": "Unknown"},
            messages={"event": "names no checkpoint folder"},
        ),
    ),
    Row(
        id="the limit is the spec's",
        job=job(
            spec={"checkpoint": {"volume": VOLUME, "verify": "OnCompletion", "verifyTimeoutSeconds": 90}},
            status=completed(),
        ),
        seen=seen(*DONE),
        want=Want(actions=(replace(CREATE, limit_s=90),), wake_in_s=90),
    ),
]

NOT_IN = "is not directly in /checkpoints/gpt, the one folder that is verified"


def elsewhere(path: str, message: str = NOT_IN, **checkpoint: Any) -> Row:
    """Row of a user's program that reports `path`, which the pod could not read: it would report the
    checkpoint as missing.
    """
    spec = verifying(command=["python", "own.py"], model=None, data=None, steps=None)
    spec["checkpoint"] = {**spec["checkpoint"], **checkpoint}
    return Row(
        id=f"a checkpoint where no pod looks is unknown at once: {path}",
        job=job(spec=spec, status=completed(path=path)),
        seen=seen(*DONE),
        want=Want(
            phase="Completed",
            actions=(),
            events=("VerificationFailed",),
            fields={"checkpoint.verification.state": "Unknown", "checkpoint.verification.tries": 0},
            conditions={"CheckpointDurable": ("True", "CheckpointDurable")},
            messages={"event": message},
        ),
    )


def inside(path: str, **checkpoint: Any) -> Row:
    return Row(
        id=f"a checkpoint in the job's own folder is looked at: {path}",
        job=job(
            spec={"checkpoint": {**verifying()["checkpoint"], **checkpoint}}, status=completed(path=path)
        ),
        seen=seen(*DONE),
        want=Want(actions=(CREATE,), events=()),
    )


PLACES = [
    elsewhere(f"/checkpoints/gpt/run7/{NAME}"),
    elsewhere(f"/checkpoints/{NAME}"),
    elsewhere(f"/checkpoints/other/{NAME}"),
    elsewhere(f"/checkpoints/gpt/../other/{NAME}"),
    elsewhere(f"/scratch/{NAME}", message="the folder that ZEROTRAIN_CHECKPOINT_DIR names"),
    elsewhere(NAME, message=f"the workers reported '{NAME}', which {NOT_IN}"),
    elsewhere(f"/checkpoints/gpt/{NAME}/x", message="not directly in /checkpoints/ml/gpt", volume=NFS),
    elsewhere(f"/checkpoints/gpt/{NAME}", message="not directly in /checkpoints/ml/gpt", volume=NFS),
    inside(f"/checkpoints/gpt/{NAME}/"),
    inside(f"/checkpoints//gpt/./{NAME}"),
    inside(f"/checkpoints/ml/gpt/{NAME}", volume=NFS),
]

FOLLOW = [
    Row(
        id="while it waits or runs nothing happens",
        job=settled(
            job(spec=verifying(), status=completed(tries=1)), seen(*DONE, helpers=(helper(pending(0)),))
        ),
        seen=seen(*DONE, helpers=(helper(running(0)),)),
        want=Want(actions=(), events=(), writes=False, wake_in_s=7200 - 60),
    ),
    Row(
        id="every byte is whole",
        job=job(spec=verifying(), status=completed(tries=1)),
        seen=seen(*DONE, helpers=(helper(ended(0, 0)),)),
        want=Want(
            actions=(),
            events=("CheckpointVerified",),
            fields={
                "checkpoint.verification.state": "Verified",
                "checkpoint.verification.completionTime": "2026-01-01T12:00:00Z",
            },
            conditions={
                "CheckpointDurable": ("True", "CheckpointVerified"),
                "Complete": ("True", "Completed"),
            },
        ),
    ),
    Row(
        id="a damaged one is told with the program's words; the job stays completed",
        job=job(spec=verifying(), status=completed(tries=1)),
        seen=seen(*DONE, helpers=(helper(ended(0, 66), termination=said("  rank-0 lacks 3 bytes")),)),
        want=Want(
            phase="Completed",
            actions=(),
            events=("CheckpointDamaged",),
            fields={"checkpoint.verification.state": "Damaged"},
            conditions={"CheckpointDurable": ("False", "CheckpointDamaged")},
            messages={"event": f"checkpoint {NAME} of step 100: rank-0 lacks 3 bytes"},
        ),
    ),
    Row(
        id="a pod that could not tell is followed by another",
        job=job(spec=verifying(), status=completed(tries=1)),
        seen=seen(*DONE, helpers=(helper(ended(0, 1, pod_reason="Evicted")),)),
        want=Want(
            actions=(replace(CREATE, pod="gpt-1-verify-2"),),
            events=(),
            fields={"checkpoint.verification.tries": 2, "checkpoint.verification.pod": "gpt-1-verify-2"},
        ),
    ),
    Row(
        id="an eviction with the code of damage is no word about the checkpoint",
        job=job(spec=verifying(), status=completed(tries=1)),
        seen=seen(*DONE, helpers=(helper(ended(0, 66, pod_reason="Evicted")),)),
        want=Want(actions=(replace(CREATE, pod="gpt-1-verify-2"),)),
    ),
    Row(
        id="a volume that fails under the reader says nothing of the checkpoint: read again",
        job=job(spec=verifying(), status=completed(tries=1)),
        seen=seen(*DONE, helpers=(helper(ended(0, 85), termination=said("error (85): EIO")),)),
        want=Want(
            actions=(replace(CREATE, pod="gpt-1-verify-2"),),
            events=(),
            fields={
                "checkpoint.verification.state": "Running",
                "checkpoint.verification.tries": 2,
            },
        ),
    ),
    Row(
        id="and not damaged when it fails under all three",
        job=job(spec=verifying(), status=completed(tries=3, pod="gpt-1-verify-3")),
        seen=seen(*DONE, helpers=(helper(ended(0, 85), "gpt-1-verify-3", termination=said("next: look")),)),
        want=Want(
            actions=(),
            events=("VerificationFailed",),
            fields={"checkpoint.verification.state": "Unknown"},
            messages={"event": "the volume failed while it was read (exit code 85): next: look"},
        ),
    ),
    Row(
        id="after three it stays unknown, and why is said",
        job=job(spec=verifying(), status=completed(tries=3, pod="gpt-1-verify-3")),
        seen=seen(
            *DONE,
            helpers=(
                helper(ended(0, 1), "gpt-1-verify-3", termination=said("No module named zerotrain.cli")),
            ),
        ),
        want=Want(
            actions=(),
            events=("VerificationFailed",),
            fields={"checkpoint.verification.state": "Unknown"},
            conditions={"CheckpointDurable": ("True", "CheckpointDurable")},
            messages={"event": "exit code 1: No module named zerotrain.cli"},
        ),
    ),
    Row(
        id="past the limit the pod goes at once and what it waited for is said",
        job=job(
            spec={"checkpoint": {"volume": VOLUME, "verify": "OnCompletion", "verifyTimeoutSeconds": 60}},
            status=completed(tries=1),
        ),
        seen=seen(*DONE, helpers=(helper(pending(0), unscheduled_reason="Unschedulable: 0/3 nodes"),)),
        want=Want(
            actions=(DeletePods(names_uids=((POD, "pod-v"),), grace_s=0),),
            events=("VerificationFailed",),
            messages={"event": "no outcome within 60 s: Unschedulable: 0/3 nodes"},
        ),
    ),
    Row(
        id="a quota that refuses the pod is said at the limit",
        job=job(
            spec={"checkpoint": {"volume": VOLUME, "verify": "OnCompletion", "verifyTimeoutSeconds": 60}},
            status=completed(tries=1),
        ),
        seen=seen(*DONE, problem=Problem(reason="QuotaExceeded", message="pods: limited to 10")),
        want=Want(actions=(), events=("VerificationFailed",), messages={"event": "pods: limited to 10"}),
    ),
    Row(
        id="taken back while it runs: the pod goes, nothing is left",
        job=job(status=completed(tries=1)),
        seen=seen(*DONE, helpers=(helper(running(0)),)),
        want=Want(
            actions=(DeletePods(names_uids=((POD, "pod-v"),), grace_s=1),),
            events=(),
            fields={"checkpoint.verification": None},
        ),
    ),
]

AROUND = [
    Row(
        id="the time to live waits for the outcome",
        job=job(
            spec=verifying(runPolicy={"ttlSecondsAfterFinished": 0}),
            status=completed(tries=1),
        ),
        seen=seen(*DONE, helpers=(helper(running(0)),)),
        want=Want(actions=(), wake_in_s=7200 - 60),
    ),
    Row(
        id="the pass that learns the outcome asks for another: no event would bring one",
        job=job(spec=verifying(runPolicy={"ttlSecondsAfterFinished": 0}), status=completed(tries=1)),
        seen=seen(*DONE, helpers=(helper(ended(0, 0)),)),
        want=Want(actions=(), events=("CheckpointVerified",), wake_in_s=0.05),
    ),
    Row(
        id="with the outcome the time to live counts from the job's end",
        job=job(
            spec=verifying(runPolicy={"ttlSecondsAfterFinished": 30}),
            status=completed(state="Verified"),
        ),
        seen=seen(*DONE, helpers=(helper(ended(0, 0)),)),
        want=Want(actions=(DeleteJob(),)),
    ),
    Row(
        id="cleanPodPolicy All takes the workers at once and the helper after its outcome",
        job=job(spec=verifying(runPolicy={"cleanPodPolicy": "All"}), status=completed(tries=1)),
        seen=seen(*DONE, helpers=(helper(running(0)),)),
        want=Want(actions=(DeleteWorkers(attempt=1, grace_s=1),)),
    ),
    Row(
        id="cleanPodPolicy All, with the outcome",
        job=job(spec=verifying(runPolicy={"cleanPodPolicy": "All"}), status=completed(state="Damaged")),
        seen=seen(helpers=(helper(ended(0, 66)),)),
        want=Want(actions=(DeletePods(names_uids=((POD, "pod-v"),), grace_s=1),), events=()),
    ),
    Row(
        id="the default keeps the helper, whose log lists everything",
        job=settled(
            job(spec=verifying(), status=completed(state="Damaged")),
            seen(*DONE, helpers=(helper(ended(0, 66)),)),
        ),
        seen=seen(*DONE, helpers=(helper(ended(0, 66)),)),
        want=Want(actions=(), events=(), writes=False),
    ),
    Row(
        id="a helper is no worker: it is neither counted nor a failure",
        job=job(status=status("Running")),
        seen=seen(running(0, ready=True), running(1, ready=True), helpers=(helper(ended(0, 1)),)),
        want=Want(phase="Running", actions=(), fields={"workers.running": 2}),
    ),
]


@pytest.mark.parametrize("row", BEGIN + PLACES + FOLLOW + AROUND, ids=lambda row: row.id)
def test_verification(row: Row) -> None:
    check(row)


@pytest.mark.parametrize(
    ("spec", "verification"),
    [
        (verifying(), {"state": "Unknown", "message": "no outcome", "completionTime": stamp(ago(5))}),
        ({"checkpoint": {"volume": VOLUME}}, {}),
    ],
    ids=["the verification is over", "the wish was taken back"],
)
@pytest.mark.parametrize("left", [pending(0), running(0)], ids=["pending", "running"])
def test_a_pod_whose_deletion_came_to_nothing_is_deleted_again(
    spec: dict[str, Any], verification: dict[str, Any], left: PodView
) -> None:
    stored, pod = completed(**verification), helper(left)
    plan = reconcile(job(spec=spec, status=stored), seen(*DONE, helpers=(pod,)), NOW)
    assert DeletePods(names_uids=((pod.name, pod.uid),), grace_s=1) in plan.actions
    goes = replace(pod, deletion_at=ago(-1))
    assert not reconcile(job(spec=spec, status=stored), seen(*DONE, helpers=(goes,)), NOW).actions
