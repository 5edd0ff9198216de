"""Pods of a scheduler that does not run: the job waits for ever, and says what for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.api_double import pod_json
from tests.operator.reconcile_builders import (
    NOW,
    UID,
    Row,
    Want,
    ago,
    check,
    job,
    pending,
    running,
    seen,
    settled,
    status,
)
from zerotrain.operator.cluster.store import PodStore, owner_key
from zerotrain.operator.reconcile import reconcile

pytestmark = pytest.mark.unit

TYPO = {"scheduling": {"schedulerName": "volcanoo"}}
MISSING = {"PodsScheduled": ("False", "SchedulerMissing"), "Reconciling": ("True", "SchedulerMissing")}
IGNORED = seen(pending(0, ignored_seen_at=ago(121)), pending(1, ignored_seen_at=ago(120)))

ROWS = [
    Row(
        id="a scheduler that does not exist",
        job=job(spec=TYPO, status=status("Pending")),
        seen=IGNORED,
        want=Want(
            phase="Pending",
            events=("SchedulerMissing",),
            conditions={**MISSING, "Stalled": ("False", "SpecAccepted")},
            messages={
                "PodsScheduled": "worker 0 (pod gpt-1-0): no scheduler has reported on it: does volcanoo "
                "run? Otherwise change spec.scheduling.schedulerName",
                "event": "does volcanoo run?",
            },
        ),
    ),
    Row(
        id="the scheduler of a gang",
        job=job(status=status("Pending", shape={"workers": 2, "gang": "scheduling.volcano.sh/v1beta1"})),
        seen=IGNORED,
        want=Want(conditions=MISSING, messages={"Reconciling": "does volcano run?"}),
    ),
    Row(
        id="the cluster's own",
        job=job(status=status("Pending")),
        seen=IGNORED,
        want=Want(conditions=MISSING, messages={"Reconciling": "does the cluster's default scheduler run?"}),
    ),
    Row(
        id="it has two minutes",
        job=job(spec=TYPO, status=status("Pending")),
        seen=seen(pending(0, ignored_seen_at=ago(110)), pending(1, ignored_seen_at=ago(100))),
        want=Want(events=(), conditions={"PodsScheduled": ("False", "WaitingForPods")}, wake_in_s=20),
    ),
    Row(
        id="a gang waits until all of its pods exist",
        job=job(status=status("Pending", podsCreated=False)),
        seen=seen(pending(0, ignored_seen_at=ago(600))),
        want=Want(events=(), conditions={"PodsScheduled": ("False", "CreatingPods")}),
    ),
    Row(
        id="and its time begins with the last of them",
        job=job(status=status("Pending")),
        seen=seen(pending(0, ignored_seen_at=ago(600)), pending(1, ignored_seen_at=ago(1))),
        want=Want(events=(), conditions={"PodsScheduled": ("False", "WaitingForPods")}, wake_in_s=119),
    ),
    Row(
        id="pods with a node",
        job=job(spec=TYPO, status=status("Pending")),
        seen=seen(running(0), running(1)),
        want=Want(events=(), conditions={"PodsScheduled": ("True", "AllScheduled")}),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row(row: Row) -> None:
    check(row)
    assert not reconcile(settled(row.job, row.seen), row.seen, NOW).events


@pytest.mark.parametrize(
    ("spec", "condition", "ignored"),
    [
        ({}, None, True),
        ({}, {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}, False),
        ({"nodeName": "n"}, None, False),
    ],
    ids=["nothing", "a reason", "a node"],
)
def test_a_pod_is_ignored_from_when_that_was_first_seen(
    spec: dict[str, Any], condition: dict[str, Any] | None, ignored: bool
) -> None:
    store, conditions = PodStore(), [condition] if condition is not None else []
    for version, seconds in ((1, 60), (2, 0)):
        pod = pod_json(0, version=version, uid=UID, conditions=conditions)
        store.put({**pod, "spec": spec}, now=ago(seconds))
    ((view,), _) = store.of_job(owner_key("ml", UID))
    assert view.ignored_seen_at == (ago(60) if ignored else None)
