"""A job in a queue of Kueue: what it waits for, what it starts with, when the quota goes back, and which
updates the queue gets: one row per situation.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.operator.reconcile.test_queueing import CREATE, apis, case, held
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
    pending,
    ready,
    seen,
    stamp,
    status,
)
from zerotrain.operator.api import ZeroTrainingJobSpec
from zerotrain.operator.api.core.meta import Toleration, TolerationOperator
from zerotrain.operator.reconcile import (
    AskQueue,
    CreateWorkers,
    DiscoverApis,
    RequestYield,
    reconcile,
)
from zerotrain.operator.reconcile.observe import QueueView
from zerotrain.operator.reconcile.plan import QueueStep
from zerotrain.operator.resources.kueue import made_from

pytestmark = pytest.mark.unit


KUEUE = apis(kueue="kueue.x-k8s.io/v1beta2")
IN_QUEUE = QueueView(exists=True, workers=2, queue="team-a", message="insufficient quota")
ADMITTED = replace(
    IN_QUEUE,
    admitted=True,
    holds_quota=True,
    cluster_queue="all",
    node_selector={"pool": "gpu"},
    tolerations=(Toleration(key="gpu", operator=TolerationOperator.EXISTS),),
    labels={"a": "b"},
    annotations={"c": "d"},
)
EVICTED = replace(ADMITTED, evicted="Preempted: by ml/other")
OUT = replace(EVICTED, admitted=False, holds_quota=False)
RUNNING = replace(ADMITTED, pods_ready=True)


def queued(phase: str | None = None, attempt: int = 0, **more: Any) -> dict[str, Any]:
    spec = {"scheduling": {"queueName": "team-a"}, **more}
    return job(spec=spec, status=status(phase, attempt) if phase else None)


def ask(step: QueueStep, **more: Any) -> AskQueue:
    return AskQueue(step=step, **more)


def report_step(step: QueueStep, phase: str) -> AskQueue:
    return AskQueue(step=step, workers=2, message=f"the job is {phase}")


def held_off(body: dict[str, Any]) -> dict[str, Any]:
    due = stamp(NOW + timedelta(seconds=290))
    return {**body, "status": {**body["status"], "nextAttemptTime": due}}


BOTH = (ready(0), ready(1))
DONE = (ended(0, 0), ended(1, 0))
QUEUES = [
    case(
        "looks-for-kueue",
        queued(),
        seen(),
        Want(actions=(DiscoverApis(),), **held("Queued", "looking for Kueue")),
    ),
    case(
        "no-kueue",
        queued(),
        seen(apis=apis()),
        Want(actions=(), wake_in_s=5, **held("QueueMissing", "install Kueue")),
    ),
    case(
        "begins-to-watch",
        queued(),
        seen(apis=KUEUE),
        Want(actions=(ask(QueueStep.FOLLOW),), **held("Queued", "asking queue team-a")),
    ),
    case(
        "makes-one-workload",
        queued(),
        seen(apis=KUEUE, queue=QueueView()),
        Want(
            actions=(ask(QueueStep.CREATE, workers=2, queue="team-a"),),
            **held("Queued", "waits for queue team-a"),
        ),
    ),
    case(
        "waits-and-says-what-the-queue-says",
        queued("Queued"),
        seen(apis=KUEUE, queue=IN_QUEUE),
        Want(actions=(), events=(), **held("Queued", "team-a: insufficient quota")),
    ),
    case(
        "reserved-is-not-admitted",
        queued("Queued"),
        seen(apis=KUEUE, queue=replace(IN_QUEUE, holds_quota=True)),
        Want(actions=(), **held("Queued")),
    ),
    case(
        "starts-where-the-queue-says",
        queued("Queued"),
        seen(apis=KUEUE, queue=ADMITTED),
        Want(
            phase="Pending",
            attempt=1,
            actions=(CREATE,),
            events=("Admitted",),
            messages={"event": "admitted by queue team-a (ClusterQueue all)"},
            fields={
                "shape.nodeSelector": {"pool": "gpu"},
                "shape.tolerations": [{"key": "gpu", "operator": "Exists"}],
                "shape.labels": {"a": "b"},
                "shape.annotations": {"c": "d"},
            },
        ),
    ),
    case(
        "an-admission-that-cannot-be-used",
        queued("Queued"),
        seen(apis=KUEUE, queue=replace(ADMITTED, problem="there is no ResourceFlavor a100")),
        Want(actions=(), **held("Queued", "there is no ResourceFlavor a100")),
    ),
    case(
        "another-size-queues-anew",
        queued("Queued", workers=3),
        seen(apis=KUEUE, queue=ADMITTED),
        Want(actions=(ask(QueueStep.DELETE),), **held("Queued")),
    ),
    case(
        "a-workload-that-a-finalizer-keeps-is-not-deleted-again",
        queued("Queued", workers=3),
        seen(apis=KUEUE, queue=replace(ADMITTED, deleting=True)),
        Want(actions=(), **held("Queued")),
    ),
    case(
        "nor-that-of-a-suspended-job",
        queued("Suspended", 1, suspend=True),
        seen(apis=KUEUE, queue=replace(ADMITTED, deleting=True)),
        Want(phase="Suspended", actions=()),
    ),
    case(
        "a-restart-keeps-the-admission",
        queued("Restarting", 1),
        seen(apis=KUEUE, queue=ADMITTED),
        Want(phase="Pending", attempt=2, actions=(CreateWorkers(attempt=2, indices=(0, 1)),)),
    ),
    case(
        "pods-are-ready",
        queued("Starting", 1),
        seen(*BOTH, apis=KUEUE, queue=ADMITTED),
        Want(phase="Running", actions=(report_step(QueueStep.PODS_READY, "Running"),)),
    ),
    case(
        "is-told-once",
        queued("Running", 1),
        seen(*BOTH, apis=KUEUE, queue=RUNNING),
        Want(phase="Running", actions=()),
    ),
    case(
        "pods-are-not-ready-any-more",
        queued("Pending", 2),
        seen(pending(0, 2), pending(1, 2), apis=KUEUE, queue=RUNNING),
        Want(phase="Pending", actions=(report_step(QueueStep.PODS_NOT_READY, "Pending"),)),
    ),
    case(
        "a-new-operator-watches-before-it-judges",
        queued("Running", 1),
        seen(*BOTH),
        Want(phase="Running", actions=(report_step(QueueStep.FOLLOW, "Running"),)),
    ),
    case(
        "evicted-yields-through-a-checkpoint",
        queued("Running", 1),
        seen(*BOTH, apis=KUEUE, queue=replace(RUNNING, evicted="Preempted: by ml/other")),
        Want(
            phase="Suspending",
            events=("QueueEvicted",),
            messages={"event": "Preempted: by ml/other"},
            fields={"yieldRequest.reason": "QueueEviction"},
        ),
    ),
    case(
        "a-deleted-workload-takes-the-pods-along",
        queued("Running", 1),
        seen(*BOTH, apis=KUEUE, queue=QueueView()),
        Want(phase="Suspending", messages={"event": "its Workload was deleted"}),
    ),
    case(
        "an-admission-taken-back",
        queued("Running", 1),
        seen(*BOTH, apis=KUEUE, queue=IN_QUEUE),
        Want(phase="Suspending", messages={"event": "not admitted any more"}),
    ),
    case(
        "the-quota-goes-back-when-the-pods-are-gone",
        queued("Queued", 1),
        seen(apis=KUEUE, queue=EVICTED),
        Want(
            phase="Queued",
            attempt=1,
            actions=(ask(QueueStep.RELEASE, message="Preempted: by ml/other"),),
            conditions={"Admitted": ("False", "QueueEvicted")},
        ),
    ),
    case(
        "evicted-and-not-looked-at-again",
        queued("Queued", 1),
        seen(apis=KUEUE, queue=replace(OUT, message="by ml/other")),
        Want(phase="Queued", actions=(), conditions={"Admitted": ("False", "QueueEvicted")}),
    ),
    case(
        "evicted-and-in-line-again-says-what-the-queue-says-now",
        queued("Queued", 1),
        seen(apis=KUEUE, queue=replace(OUT, message="2 more needed")),
        Want(
            phase="Queued",
            actions=(),
            conditions={"Admitted": ("False", "Queued")},
            messages={"Admitted": "team-a: 2 more needed (evicted: Preempted: by ml/other)"},
        ),
    ),
    case(
        "the-quota-stays-while-a-pod-is-there",
        queued("Queued", 1),
        seen(ended(0, 75), apis=KUEUE, queue=EVICTED),
        Want(phase="Queued", attempt=1),
    ),
    case(
        "admitted-again-goes-on-as-the-next-attempt",
        queued("Queued", 1),
        seen(apis=KUEUE, queue=ADMITTED),
        Want(phase="Pending", attempt=2),
    ),
    case(
        "evicted-in-the-hold-off-gives-the-quota-back-at-once",
        held_off(queued("Restarting", 1)),
        seen(apis=KUEUE, queue=EVICTED),
        Want(
            phase="Restarting",
            actions=(ask(QueueStep.RELEASE, message="Preempted: by ml/other"),),
            wake_in_s=290,
        ),
    ),
    case(
        "evicted-in-the-hold-off-while-a-pod-is-left",
        held_off(queued("Restarting", 1)),
        seen(going(0, grace_s=1), apis=KUEUE, queue=EVICTED),
        Want(phase="Restarting", actions=()),
    ),
    case(
        "released-once",
        held_off(queued("Restarting", 1)),
        seen(apis=KUEUE, queue=replace(EVICTED, holds_quota=False, admitted=False)),
        Want(phase="Restarting", actions=()),
    ),
    case(
        "time-in-the-queue-is-not-active-time",
        queued("Restarting", 1, runPolicy={"activeDeadlineSeconds": 700}),
        seen(apis=KUEUE, queue=EVICTED),
        Want(phase="Queued", fields={"startTime": None}),
    ),
    case(
        "time-in-the-queue-is-not-active-time-after-a-resize",
        queued("Restarting", 1, runPolicy={"activeDeadlineSeconds": 700}),
        seen(apis=KUEUE, queue=QueueView()),
        Want(phase="Queued", fields={"startTime": None}),
    ),
    case(
        "a-deadline-does-not-pass-in-the-queue",
        queued("Queued", 1, runPolicy={"activeDeadlineSeconds": 60}),
        seen(apis=KUEUE, queue=IN_QUEUE),
        Want(phase="Queued", events=(), fields={"startTime": None}),
    ),
    case(
        "a-restart-that-keeps-its-admission-keeps-its-clock",
        queued("Restarting", 1, runPolicy={"activeDeadlineSeconds": 700}),
        seen(apis=KUEUE, queue=ADMITTED),
        Want(phase="Pending", attempt=2, fields={"startTime": stamp(ago(600))}),
    ),
    case(
        "a-queue-name-that-is-gone-keeps-no-quota",
        job(spec={"suspend": True}, status=status("Suspended", 1)),
        seen(apis=KUEUE, queue=ADMITTED),
        Want(phase="Suspended", actions=(report_step(QueueStep.DELETE, "Suspended"),)),
    ),
    case(
        "a-queue-name-that-is-gone-keeps-the-quota-of-pods-that-yield",
        job(spec={"suspend": True}, status=status("Running", 1)),
        seen(*BOTH, apis=KUEUE, queue=RUNNING),
        Want(phase="Suspending", actions=(RequestYield(attempt=1, pod="gpt-1-0", pod_ip="10.0.0.0"),)),
    ),
    case(
        "a-queue-name-that-is-gone-at-the-end",
        job(status=status("Running", 1)),
        seen(*DONE, apis=KUEUE, queue=RUNNING),
        Want(phase="Completed", actions=(report_step(QueueStep.DELETE, "Completed"),)),
    ),
    case(
        "suspended-leaves-the-queue",
        queued("Suspended", 1, suspend=True),
        seen(apis=KUEUE, queue=ADMITTED),
        Want(phase="Suspended", actions=(report_step(QueueStep.DELETE, "Suspended"),)),
    ),
    case(
        "completed-is-finished",
        queued("Running", 1),
        seen(*DONE, apis=KUEUE, queue=RUNNING),
        Want(phase="Completed", actions=(report_step(QueueStep.FINISH, "Completed"),)),
    ),
    case(
        "failed-is-finished",
        queued("Failed", 1, runPolicy={"cleanPodPolicy": "None"}),
        seen(apis=KUEUE, queue=ADMITTED),
        Want(phase="Failed", actions=(report_step(QueueStep.FINISH, "Failed"),)),
    ),
    case(
        "the-quota-stays-while-a-pod-of-a-failed-job-is-on-its-way-out",
        queued("Failed", 1),
        seen(ended(0, 65), going(1, grace_s=1), apis=KUEUE, queue=ADMITTED),
        Want(phase="Failed", actions=()),
    ),
    case(
        "and-while-something-runs-beside-a-worker-that-has-ended",
        queued("Completed", 1),
        seen(ended(0, 0, phase="Running"), ended(1, 0), apis=KUEUE, queue=ADMITTED),
        Want(phase="Completed", actions=()),
    ),
    case(
        "pods-that-the-policy-leaves-alone-do-not-keep-the-quota-for-ever",
        queued("Completed", 1, runPolicy={"cleanPodPolicy": "None"}),
        seen(ended(0, 0), going(1, grace_s=1), apis=KUEUE, queue=ADMITTED),
        Want(phase="Completed", actions=(report_step(QueueStep.FINISH, "Completed"),)),
    ),
    case(
        "finished-is-told-once",
        queued("Completed", 1),
        seen(apis=KUEUE, queue=replace(ADMITTED, finished=True)),
        Want(phase="Completed", actions=()),
    ),
    case(
        "auto-in-a-queue-is-none-where-nobody-places-groups",
        job(spec={"scheduling": {"queueName": "team-a", "gang": "Auto"}}),
        seen(apis=KUEUE, queue=ADMITTED),
        Want(phase="Pending", actions=(CREATE,), fields={"shape.gang": ""}),
    ),
]

EDITED: dict[str, Any] = {"scheduling": {"queueName": "team-a", "nodeSelector": {"pool": "b"}}}
OF_BEFORE = made_from(ZeroTrainingJobSpec.model_validate(queued()["spec"]))
OF_NOW = made_from(ZeroTrainingJobSpec.model_validate(queued(**EDITED)["spec"]))
STOPPING = {
    "yieldRequest": {"reason": "Suspend", "requestedAt": stamp(ago(30)), "joined": True},
    "checkpoint": {"requestedAt": stamp(ago(30))},
}
"""Status of ranks that checkpoint for a suspension; by now the job is resumed."""


def stopping(**spec: Any) -> dict[str, Any]:
    body = queued("Suspending", 1, **spec)
    return {**body, "status": {**body["status"], **STOPPING}}


YIELDED = tuple(ended(index, 75, termination=last_words(75, step=31)) for index in range(2))
PODS_OF_A_WORKLOAD = [
    case(
        "edited-and-resumed-while-the-ranks-yielded-queues-anew",
        stopping(**EDITED),
        seen(gone=YIELDED, apis=KUEUE, queue=replace(RUNNING, made_from=OF_BEFORE)),
        Want(
            phase="Queued",
            attempt=1,
            actions=(ask(QueueStep.DELETE),),
            conditions={"Admitted": ("False", "Queued")},
        ),
    ),
    case(
        "resumed-as-it-was-keeps-the-admission",
        stopping(),
        seen(gone=YIELDED, apis=KUEUE, queue=replace(RUNNING, made_from=OF_BEFORE)),
        Want(phase="Pending", attempt=2, fields={"shape.nodeSelector": {"pool": "gpu"}}),
    ),
    case(
        "a-workload-of-an-older-operator-stays",
        stopping(**EDITED),
        seen(gone=YIELDED, apis=KUEUE, queue=RUNNING),
        Want(phase="Pending", attempt=2),
    ),
    case(
        "edited-in-the-queue-under-a-suspension-that-no-pass-saw",
        queued("Queued", **EDITED),
        seen(apis=KUEUE, queue=replace(IN_QUEUE, made_from=OF_BEFORE)),
        Want(actions=(ask(QueueStep.DELETE),), **held("Queued")),
    ),
    case(
        "other-pods-than-those-that-were-admitted-do-not-start",
        queued("Queued", **EDITED),
        seen(apis=KUEUE, queue=replace(ADMITTED, made_from=OF_BEFORE)),
        Want(actions=(ask(QueueStep.DELETE),), **held("Queued")),
    ),
    case(
        "the-pods-that-were-admitted-start",
        queued("Queued", **EDITED),
        seen(apis=KUEUE, queue=replace(ADMITTED, made_from=OF_NOW)),
        Want(phase="Pending", attempt=1, actions=(CREATE,)),
    ),
    case(
        "pods-that-run-keep-their-workload-until-they-are-gone",
        queued("Running", 1, **EDITED),
        seen(*BOTH, apis=KUEUE, queue=replace(RUNNING, made_from=OF_BEFORE)),
        Want(phase="Running", actions=()),
    ),
    case(
        "a-priority-that-changed-after-the-admission-gives-nothing-up",
        queued("Restarting", 1, scheduling={"queueName": "team-a", "priorityClassName": "high"}),
        seen(apis=KUEUE, queue=replace(ADMITTED, made_from=OF_BEFORE)),
        Want(phase="Pending", attempt=2),
    ),
]


@pytest.mark.parametrize("row", [*QUEUES, *PODS_OF_A_WORKLOAD], ids=lambda row: row.id)
def test_row(row: Row) -> None:
    check(row)


def test_another_manager_s_job_is_left_alone() -> None:
    other = job(spec={"scheduling": {"queueName": "team-a"}, "managedBy": "kueue.x-k8s.io/multikueue"})
    plan = reconcile(other, seen(apis=KUEUE, queue=ADMITTED), NOW)
    assert (plan.status, plan.actions, plan.events) == (None, (), ())
