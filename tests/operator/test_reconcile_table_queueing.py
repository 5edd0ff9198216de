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
    job,
    pending,
    seen,
    status,
)
from zerotrain.operator.api import AttemptShape
from zerotrain.operator.api.scheduling import Gang
from zerotrain.operator.reconcile import (
    AskRoom,
    CreateWorkers,
    DiscoverApis,
    Observed,
    OpenGates,
    reconcile,
)
from zerotrain.operator.reconcile.claims import Verdict
from zerotrain.operator.reconcile.queues import ClusterApis

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
        "what-was-counted-lets-it-in",
        job(spec={"scheduling": {"gang": "Operator"}}, status=status("Queued", 0)),
        seen(capacity=room(True)),
        Want(phase="Pending", events=("Admitted",), says={"event": "there is room for all workers"}),
    ),
    case(
        "where-nobody-may-count-that-is-not-said",
        job(spec={"scheduling": {"gang": "Operator"}}, status=status("Queued", 0)),
        seen(capacity=room(True, counted=False)),
        Want(phase="Pending", events=("Admitted",), says={"event": "room was not counted"}),
    ),
    case(
        "nor-where-another-scheduler-counts",
        job(spec={"scheduling": {"gang": "Volcano"}}, status=status("Queued", 0)),
        seen(apis=apis(volcano=VOLCANO)),
        Want(phase="Pending", events=("Admitted",), says={"event": f"by a PodGroup of {VOLCANO}"}),
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


@pytest.mark.parametrize("row", GANGS, ids=lambda row: row.id)
def test_row(row: Row) -> None:
    check(row)


def test_a_waiting_job_writes_nothing_while_nothing_changes() -> None:
    waiting = seen(capacity=NOT_YET)
    first = reconcile(gang("Operator"), waiting, NOW)
    assert first.status is not None
    stored = first.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    later = NOW + timedelta(seconds=20)
    newer = seen(capacity=replace(NOT_YET, at=later))
    again = reconcile({**gang("Operator"), "status": stored}, newer, later)
    assert (again.status, again.actions, again.events) == (None, (), ())
