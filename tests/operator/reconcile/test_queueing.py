"""Conditions that an attempt waits for, its settings at the start, and the queue's updates: one row per
situation.
"""

from __future__ import annotations

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
from zerotrain.operator.api.scheduling import Gang
from zerotrain.operator.reconcile import CreateWorkers, DiscoverApis, Observed, reconcile
from zerotrain.operator.reconcile.observe import ClusterApis

pytestmark = pytest.mark.unit


NATIVE = "scheduling.k8s.io/v1alpha2"
VOLCANO = "scheduling.volcano.sh/v1beta1"
CREATE = CreateWorkers(attempt=1, indices=(0, 1))


def case(name: str, body: dict[str, Any], observed: Observed, want: Want) -> Row:
    return Row(id=name, job=body, seen=observed, want=want)


def apis(*, kueue: str | None = None, s_ago: float = 5, **gangs: str) -> ClusterApis:
    named = {Gang(name.capitalize()): version for name, version in gangs.items()}
    return ClusterApis(at=ago(s_ago), gangs=named, kueue=kueue)


def gang(name: str, **more: Any) -> dict[str, Any]:
    return job(spec={"scheduling": {"gang": name}, **more})


def held(reason: str, text: str = "") -> dict[str, Any]:
    return {
        "phase": "Queued",
        "attempt": 0,
        "conditions": {"Admitted": ("False", reason), "PodsScheduled": ("False", reason)},
        "messages": {"Admitted": text},
    }


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
        "auto-is-none-where-nobody-places-groups",
        gang("Auto"),
        seen(apis=apis()),
        Want(phase="Pending", actions=(CREATE,), fields={"shape.gang": ""}),
    ),
    case(
        "suspended-while-it-waits",
        job(spec={"scheduling": {"gang": "Volcano"}, "suspend": True}, status=status("Queued", 0)),
        seen(apis=apis()),
        Want(phase="Suspended", actions=()),
    ),
    case(
        "deadline-while-it-waits-for-a-restart",
        job(
            spec={"scheduling": {"gang": "Volcano"}, "runPolicy": {"activeDeadlineSeconds": 60}},
            status=status("Queued", 1),
        ),
        seen(apis=apis()),
        Want(phase="Failed", events=("DeadlineExceeded",)),
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
        "the-event-names-the-group",
        job(spec={"scheduling": {"gang": "Volcano"}}, status=status("Queued", 0)),
        seen(apis=apis(volcano=VOLCANO)),
        Want(phase="Pending", events=("Admitted",), messages={"event": f"by a PodGroup of {VOLCANO}"}),
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
]


@pytest.mark.parametrize("row", GANGS, ids=lambda row: row.id)
def test_row(row: Row) -> None:
    check(row)


def test_a_waiting_job_writes_nothing_while_nothing_changes() -> None:
    waiting = seen(apis=apis(s_ago=0))
    first = reconcile(gang("Volcano"), waiting, NOW)
    assert first.status is not None
    stored = first.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    again = reconcile({**gang("Volcano"), "status": stored}, waiting, NOW + timedelta(seconds=5))
    assert (again.status, again.actions, again.events) == (None, (), ())
