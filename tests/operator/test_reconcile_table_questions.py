"""What a waiting job asks of the cluster's room and of its queue when its question changes or ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    Row,
    Want,
    ago,
    check,
    job,
    pending,
    ready,
    run,
    seen,
    stamp,
    status,
)
from zerotrain.operator.api import AttemptShape
from zerotrain.operator.reconcile import AskQueue, AskRoom, OpenGates
from zerotrain.operator.reconcile.claims import Verdict
from zerotrain.operator.reconcile.observe import pod_view
from zerotrain.operator.reconcile.queues import ClusterApis, QueueStep, QueueView

NOT_YET = Verdict(admitted=False, workers=2, at=ago(1), message="room for 1 of 2 workers")
AWAY = AttemptShape(workers=2, excluded_nodes=("n1",))
TWO = AttemptShape(workers=2)
KUEUE = ClusterApis(at=ago(5), kueue="kueue.x-k8s.io/v1beta1")
FOLLOW = QueueStep.FOLLOW


def waits(until_s: float | None = None, **scheduling: Any) -> dict[str, Any]:
    """Queued for room; with `until_s`, a node is excluded for so long from now on."""
    excluded = [] if until_s is None else [{"name": "n1", "until": stamp(ago(-until_s)), "reason": "failed"}]
    now = status("Queued", 1, excludedNodes=excluded)
    return job(spec={"scheduling": {"gang": "Operator", **scheduling}}, status=now)


def queued(phase: str = "Queued", **scheduling: Any) -> dict[str, Any]:
    done = {"completionTime": stamp(ago(9))} if phase == "Completed" else {}
    spec = {"scheduling": {"queueName": "q", **scheduling}, "suspend": phase == "Suspended"}
    return job(spec=spec, status=status(phase, 0 if phase == "Queued" else 1, **done))


def in_queue(**more: Any) -> QueueView:
    return QueueView(**{"exists": True, "workers": 2, "queue": "q", **more})


def gone(**metadata: Any) -> dict[str, Any]:
    return {**job(status=status("Queued", 0), **metadata)}


ROOM = [
    Row(
        id="an-exclusion-lasts",
        job=waits(until_s=40),
        seen=seen(capacity=NOT_YET, question=AskRoom(shape=AWAY)),
        want=Want(actions=(), wake_in_s=40),
    ),
    Row(
        id="an-exclusion-ended",
        job=waits(until_s=-10),
        seen=seen(capacity=NOT_YET, question=AskRoom(shape=AWAY)),
        want=Want(phase="Queued", actions=(AskRoom(shape=TWO),)),
    ),
    Row(
        id="a-new-priority-is-asked-with",
        job=waits(priorityClassName="high"),
        seen=seen(capacity=NOT_YET, question=AskRoom(shape=TWO)),
        want=Want(phase="Queued", actions=(AskRoom(shape=TWO, priority_class="high"),)),
    ),
    Row(
        id="a-yes-to-another-question-is-none",
        job=waits(priorityClassName="high"),
        seen=seen(
            capacity=Verdict(admitted=True, workers=2, at=ago(1)),
            question=AskRoom(shape=TWO, priority_class="low"),
        ),
        want=Want(phase="Queued", actions=(AskRoom(shape=TWO, priority_class="high"),)),
    ),
    Row(
        id="a-job-that-is-being-deleted-asks-no-more",
        job=gone(deletionTimestamp=stamp(ago(1)), finalizers=["a/user"]),
        seen=seen(question=AskRoom(shape=TWO)),
        want=Want(actions=(AskRoom(shape=None),), writes=False),
    ),
    Row(
        id="a-job-that-is-being-deleted-and-asked-nothing",
        job=gone(deletionTimestamp=stamp(ago(1))),
        seen=seen(),
        want=Want(actions=(), writes=False),
    ),
    Row(
        id="an-unreadable-job-asks-no-more",
        job=job(spec={"scheduling": {"gang": "Nonsense"}}, status=status("Queued", 0)),
        seen=seen(capacity=NOT_YET, question=AskRoom(shape=TWO)),
        want=Want(phase="Stalled", actions=(AskRoom(shape=None),)),
    ),
    Row(
        id="suspended-before-the-answer",
        job=job(spec={"suspend": True, "scheduling": {"gang": "Operator"}}, status=status("Suspended", 0)),
        seen=seen(question=AskRoom(shape=TWO)),
        want=Want(phase="Suspended", actions=(AskRoom(shape=None),)),
    ),
]

QUEUE = [
    Row(
        id="a-new-priority-queues-anew",
        job=queued(priorityClassName="high"),
        seen=seen(apis=KUEUE, queue=in_queue(priority_class="low")),
        want=Want(phase="Queued", actions=(AskQueue(step=QueueStep.DELETE),)),
    ),
    Row(
        id="the-same-priority-waits",
        job=queued(priorityClassName="high"),
        seen=seen(apis=KUEUE, queue=in_queue(priority_class="high")),
        want=Want(phase="Queued", actions=()),
    ),
    Row(
        id="with-quota-the-old-priority-stays",
        job=queued(priorityClassName="high"),
        seen=seen(apis=KUEUE, queue=in_queue(priority_class="low", holds_quota=True)),
        want=Want(phase="Queued", actions=()),
    ),
    Row(
        id="followed-but-not-listed-yet",
        job=queued(),
        seen=seen(apis=KUEUE, follows_queues=True),
        want=Want(phase="Queued", actions=(), wake_in_s=2),
    ),
    *(
        Row(
            id=f"nothing-to-repeat-without-kueue-{phase}",
            job=queued(phase),
            seen=seen(
                *((ready(0), ready(1)) if phase == "Running" else ()),
                apis=ClusterApis(at=ago(5)),
                follows_queues=True,
            ),
            want=Want(phase=phase, actions=()),
        )
        for phase in ("Suspended", "Completed", "Running")
    ),
    Row(
        id="followed-once",
        job=queued("Suspended"),
        seen=seen(apis=KUEUE),
        want=Want(actions=(AskQueue(step=FOLLOW, workers=2, message="the job is Suspended"),)),
    ),
]


@pytest.mark.parametrize("row", ROOM + QUEUE, ids=lambda row: row.id)
def test_reconcile(row: Row) -> None:
    check(row)


@pytest.mark.parametrize(
    ("gates", "is_ours"),
    [((), False), (("zerotrain.dev/all-workers",), True), (("kueue.x-k8s.io/topology",), False)],
)
def test_only_our_gate_is_opened(gates: tuple[str, ...], is_ours: bool) -> None:
    """Somebody else's gate is theirs to open: a patch that changes nothing would be sent every second."""
    labels = {"zerotrain.dev/job": "gpt", "zerotrain.dev/attempt": "1", "zerotrain.dev/rank": "0"}
    pod = {
        "metadata": {"name": "gpt-1-0", "uid": "u", "labels": labels},
        "spec": {"schedulingGates": [{"name": name} for name in gates]},
    }
    view = pod_view(pod, seen_at=ago(0))
    assert view is not None
    assert view.gated is is_ours
    row = Row(
        id="gates",
        job=job(status=status("Pending", 1, shape={"workers": 2, "gang": "Operator"})),
        seen=seen(view, pending(1)),
        want=Want(),
    )
    plan, _ = run(row)
    assert (OpenGates(pods=("gpt-1-0",)) in plan.actions) is is_ours
