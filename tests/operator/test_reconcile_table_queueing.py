"""What an attempt waits for, what it starts with, and what the queue is told: one row per situation."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
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
    pending,
    ready,
    seen,
    stamp,
    status,
)
from zerotrain.operator.api import AttemptShape
from zerotrain.operator.api.core.meta import Toleration, TolerationOperator
from zerotrain.operator.api.scheduling import Gang
from zerotrain.operator.reconcile import (
    AskQueue,
    AskRoom,
    CreateWorkers,
    DiscoverApis,
    Observed,
    OpenGates,
    RequestYield,
    reconcile,
)
from zerotrain.operator.reconcile.capacity import Verdict
from zerotrain.operator.reconcile.queues import ClusterApis, QueueStep, QueueView

NATIVE = "scheduling.k8s.io/v1alpha2"
VOLCANO = "scheduling.volcano.sh/v1beta1"
TWO = AttemptShape(workers=2)
OWN = {"workers": 2, "gang": "Operator"}
CREATE = CreateWorkers(attempt=1, indices=(0, 1))


def case(name: str, body: dict[str, Any], observed: Observed, want: Want) -> Row:
    return Row(id=name, job=body, seen=observed, want=want)


def apis(*, kueue: str | None = None, s_ago: float = 5, **gangs: str) -> ClusterApis:
    named = {Gang(name.capitalize()): version for name, version in gangs.items()}
    return ClusterApis(at=ago(s_ago), gangs=named, kueue=kueue)


def gang(name: str, **more: Any) -> dict[str, Any]:
    return job(spec={"scheduling": {"gang": name}, **more})


def room(admitted: bool, *, s_ago: float = 1, workers: int = 2, **more: Any) -> Verdict:
    return Verdict(admitted=admitted, workers=workers, at=ago(s_ago), **more)


def held(reason: str, text: str = "") -> dict[str, Any]:
    return {
        "phase": "Queued",
        "attempt": 0,
        "conditions": {"Admitted": ("False", reason), "PodsScheduled": ("False", reason)},
        "says": {"Admitted": text},
    }


NOT_YET = room(False, message="room for 1 of 2 workers")

GANGS = [
    case("no-gang-asks-nothing", job(), seen(), Want(phase="Pending", actions=(CREATE,))),
    case("none-asks-nothing", gang("None"), seen(), Want(phase="Pending", actions=(CREATE,))),
    case("auto-looks-around", gang("Auto"), seen(), Want(actions=(DiscoverApis(),), **held("Queued"))),
    case(
        "auto-takes-native-first",
        gang("Auto"),
        seen(apis=apis(native=NATIVE, volcano=VOLCANO)),
        Want(phase="Pending", actions=(CREATE,), fields={"shape.gang": NATIVE}),
    ),
    case(
        "auto-takes-volcano",
        gang("Auto"),
        seen(apis=apis(volcano=VOLCANO)),
        Want(phase="Pending", actions=(CREATE,), fields={"shape.gang": VOLCANO}),
    ),
    case(
        "auto-counts-the-room-itself",
        gang("Auto"),
        seen(apis=apis()),
        Want(actions=(AskRoom(shape=TWO),), **held("WaitingForRoom", "reading nodes")),
    ),
    case(
        "auto-with-one-worker-is-no-gang",
        gang("Auto", workers=1),
        seen(),
        Want(phase="Pending", fields={"shape.gang": ""}),
    ),
    case(
        "named-mechanism",
        gang("Volcano"),
        seen(apis=apis(native=NATIVE, volcano=VOLCANO)),
        Want(phase="Pending", fields={"shape.gang": VOLCANO}),
    ),
    case(
        "missing-mechanism",
        gang("Volcano"),
        seen(apis=apis(native=NATIVE)),
        Want(actions=(), wake_in_s=5, **held("GangMissing", "pod groups of scheduling.volcano.sh")),
    ),
    case(
        "missing-mechanism-is-looked-for-again",
        gang("Volcano"),
        seen(apis=apis(s_ago=11)),
        Want(actions=(DiscoverApis(),), **held("GangMissing")),
    ),
    case(
        "operator-asks",
        gang("Operator"),
        seen(),
        Want(actions=(AskRoom(shape=TWO),), events=("WaitingForRoom",), **held("WaitingForRoom")),
    ),
    case(
        "operator-waits",
        gang("Operator"),
        seen(capacity=NOT_YET),
        Want(actions=(), **held("WaitingForRoom", "room for 1 of 2 workers")),
    ),
    case(
        "operator-starts",
        gang("Operator"),
        seen(capacity=room(True)),
        Want(
            phase="Pending",
            attempt=1,
            actions=(CREATE,),
            fields={"shape.gang": "Operator"},
        ),
    ),
    case(
        "the-question-is-withdrawn-once-it-started",
        job(spec={"scheduling": {"gang": "Operator"}}, status=status("Pending", 1)),
        seen(pending(0), pending(1), capacity=room(True)),
        Want(phase="Pending", actions=(AskRoom(shape=None),)),
    ),
    case(
        "gates-open-when-all-workers-exist",
        job(spec={"scheduling": {"gang": "Operator"}}, status=status("Pending", 1, shape=OWN)),
        seen(pending(0, gated=True), pending(1, gated=True)),
        Want(phase="Pending", actions=(OpenGates(pods=("gpt-1-0", "gpt-1-1")),)),
    ),
    case(
        "gates-stay-closed-while-one-is-missing",
        job(
            spec={"scheduling": {"gang": "Operator"}},
            status=status("Pending", 1, shape=OWN, podsCreated=False),
        ),
        seen(pending(0, gated=True)),
        Want(phase="Pending", actions=(CreateWorkers(attempt=1, indices=(1,)),)),
    ),
    case(
        "gates-of-others-are-theirs",
        job(status=status("Pending", 1)),
        seen(pending(0, gated=True), pending(1, gated=True)),
        Want(phase="Pending", actions=()),
    ),
    case(
        "an-old-word-is-not-acted-upon",
        gang("Operator"),
        seen(capacity=room(True, s_ago=31)),
        Want(actions=(AskRoom(shape=TWO),), **held("WaitingForRoom")),
    ),
    case(
        "a-word-on-another-size-is-not-acted-upon",
        gang("Operator"),
        seen(capacity=room(True, workers=3)),
        Want(actions=(AskRoom(shape=TWO),), **held("WaitingForRoom")),
    ),
    case(
        "suspended-while-it-waits",
        job(spec={"scheduling": {"gang": "Operator"}, "suspend": True}, status=status("Queued", 0)),
        seen(capacity=NOT_YET),
        Want(phase="Suspended", actions=(AskRoom(shape=None),)),
    ),
    case(
        "deadline-while-it-waits-for-a-restart",
        job(
            spec={"scheduling": {"gang": "Operator"}, "runPolicy": {"activeDeadlineSeconds": 60}},
            status=status("Queued", 1),
        ),
        seen(capacity=NOT_YET),
        Want(phase="Failed", events=("DeadlineExceeded",)),
    ),
    case(
        "a-running-attempt-keeps-its-gang",
        job(
            spec={"scheduling": {"gang": "Auto"}},
            status=status("Pending", 1, shape={"workers": 2, "gang": VOLCANO}),
        ),
        seen(pending(0), pending(1), apis=apis(native=NATIVE)),
        Want(phase="Pending", attempt=1, actions=(), fields={"shape.gang": VOLCANO}),
    ),
    case(
        "a-chosen-domain-and-kept-nodes-go-into-the-shape",
        job(spec={"scheduling": {"gang": "Operator", "topologyKey": "rack"}}),
        seen(capacity=room(True, domain="r7", avoid=("node-3",))),
        Want(
            phase="Pending",
            fields={"shape.nodeSelector": {"rack": "r7"}, "shape.avoidedNodes": ["node-3"]},
        ),
    ),
]

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
RUNNING = replace(ADMITTED, pods_ready=True)


def queued(phase: str | None = None, attempt: int = 0, **more: Any) -> dict[str, Any]:
    spec = {"scheduling": {"queueName": "team-a"}, **more}
    return job(spec=spec, status=status(phase, attempt) if phase else None)


def ask(step: QueueStep, **more: Any) -> AskQueue:
    return AskQueue(step=step, **more)


def told(step: QueueStep, phase: str) -> AskQueue:
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
        Want(actions=(ask(QueueStep.CREATE, workers=2),), **held("Queued", "waits for queue team-a")),
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
            says={"event": "admitted by queue team-a (ClusterQueue all)"},
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
        "a-restart-keeps-the-admission",
        queued("Restarting", 1),
        seen(apis=KUEUE, queue=ADMITTED),
        Want(phase="Pending", attempt=2, actions=(CreateWorkers(attempt=2, indices=(0, 1)),)),
    ),
    case(
        "pods-are-ready",
        queued("Starting", 1),
        seen(*BOTH, apis=KUEUE, queue=ADMITTED),
        Want(phase="Running", actions=(told(QueueStep.PODS_READY, "Running"),)),
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
        Want(phase="Pending", actions=(told(QueueStep.PODS_NOT_READY, "Pending"),)),
    ),
    case(
        "a-new-operator-watches-before-it-judges",
        queued("Running", 1),
        seen(*BOTH),
        Want(phase="Running", actions=(told(QueueStep.FOLLOW, "Running"),)),
    ),
    case(
        "evicted-yields-through-a-checkpoint",
        queued("Running", 1),
        seen(*BOTH, apis=KUEUE, queue=replace(RUNNING, evicted="Preempted: by ml/other")),
        Want(
            phase="Suspending",
            events=("QueueEvicted",),
            says={"event": "Preempted: by ml/other"},
            fields={"yieldRequest.reason": "QueueEviction"},
        ),
    ),
    case(
        "a-deleted-workload-takes-the-pods-along",
        queued("Running", 1),
        seen(*BOTH, apis=KUEUE, queue=QueueView()),
        Want(phase="Suspending", says={"event": "its Workload was deleted"}),
    ),
    case(
        "an-admission-taken-back",
        queued("Running", 1),
        seen(*BOTH, apis=KUEUE, queue=IN_QUEUE),
        Want(phase="Suspending", says={"event": "not admitted any more"}),
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
        "waiting-for-room-is-active-time",
        job(
            spec={"scheduling": {"gang": "Operator"}, "runPolicy": {"activeDeadlineSeconds": 700}},
            status=status("Restarting", 1),
        ),
        seen(capacity=NOT_YET),
        Want(phase="Queued", fields={"startTime": stamp(ago(600))}),
    ),
    case(
        "a-queue-name-that-is-gone-keeps-no-quota",
        job(spec={"suspend": True}, status=status("Suspended", 1)),
        seen(apis=KUEUE, queue=ADMITTED),
        Want(phase="Suspended", actions=(told(QueueStep.DELETE, "Suspended"),)),
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
        Want(phase="Completed", actions=(told(QueueStep.DELETE, "Completed"),)),
    ),
    case(
        "suspended-leaves-the-queue",
        queued("Suspended", 1, suspend=True),
        seen(apis=KUEUE, queue=ADMITTED),
        Want(phase="Suspended", actions=(told(QueueStep.DELETE, "Suspended"),)),
    ),
    case(
        "completed-is-finished",
        queued("Running", 1),
        seen(*DONE, apis=KUEUE, queue=RUNNING),
        Want(phase="Completed", actions=(told(QueueStep.FINISH, "Completed"),)),
    ),
    case(
        "failed-is-finished",
        queued("Failed", 1, runPolicy={"cleanPodPolicy": "None"}),
        seen(apis=KUEUE, queue=ADMITTED),
        Want(phase="Failed", actions=(told(QueueStep.FINISH, "Failed"),)),
    ),
    case(
        "finished-is-told-once",
        queued("Completed", 1),
        seen(apis=KUEUE, queue=replace(ADMITTED, finished=True)),
        Want(phase="Completed", actions=()),
    ),
    case(
        "auto-in-a-queue-does-not-count-the-room-again",
        job(spec={"scheduling": {"queueName": "team-a", "gang": "Auto"}}),
        seen(apis=KUEUE, queue=ADMITTED),
        Want(phase="Pending", actions=(CREATE,), fields={"shape.gang": ""}),
    ),
    case(
        "the-gang-comes-after-the-queue",
        job(spec={"scheduling": {"queueName": "team-a", "gang": "Operator"}}),
        seen(apis=KUEUE, queue=ADMITTED),
        Want(actions=(AskRoom(shape=TWO),), **held("WaitingForRoom")),
    ),
]


@pytest.mark.parametrize("row", [*GANGS, *QUEUES], ids=lambda row: row.id)
def test_row(row: Row) -> None:
    check(row)


def test_another_manager_s_job_is_left_alone() -> None:
    other = job(spec={"scheduling": {"queueName": "team-a"}, "managedBy": "kueue.x-k8s.io/multikueue"})
    plan = reconcile(other, seen(apis=KUEUE, queue=ADMITTED), NOW)
    assert (plan.status, plan.actions, plan.events) == (None, (), ())


def test_a_waiting_job_writes_nothing_while_nothing_changes() -> None:
    waiting = seen(capacity=NOT_YET)
    first = reconcile(gang("Operator"), waiting, NOW)
    assert first.status is not None
    stored = first.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    later = NOW + timedelta(seconds=20)
    newer = seen(capacity=replace(NOT_YET, at=later))
    again = reconcile({**gang("Operator"), "status": stored}, newer, later)
    assert (again.status, again.actions, again.events) == (None, (), ())
