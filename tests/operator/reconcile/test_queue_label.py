"""The label of Kueue's own jobs names the queue of a job, too: where both are given they must agree, and a
change counts from the next suspension.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import NOW, job, ready, seen, status
from zerotrain.operator.cluster.job_metrics import values_of
from zerotrain.operator.reconcile import Plan, reconcile
from zerotrain.operator.reconcile.observe import ClusterApis, QueueView
from zerotrain.operator.reconcile.plan import AskQueue, QueueStep

pytestmark = pytest.mark.unit

LABEL = "kueue.x-k8s.io/queue-name"
APIS = ClusterApis(at=NOW, kueue="kueue.x-k8s.io/v1beta1")
NO_WORKLOAD = QueueView(exists=False)
ADMITTED = QueueView(exists=True, admitted=True, holds_quota=True, pods_ready=True, queue="team-a", workers=2)


def labelled(label: str | None, field: str | None = None, **stored: Any) -> dict[str, Any]:
    labels = {} if label is None else {LABEL: label}
    spec = {} if field is None else {"scheduling": {"queueName": field}}
    return job(labels=labels, spec=spec, status=stored)


def passed(body: dict[str, Any], *pods: Any, queue: QueueView = NO_WORKLOAD) -> Plan:
    return reconcile(body, seen(*pods, apis=APIS, queue=queue, follows_queues=True), NOW)


def asked(plan: Plan) -> list[tuple[QueueStep, str]]:
    return [(action.step, action.queue) for action in plan.actions if isinstance(action, AskQueue)]


def running(label: str | None, field: str | None = None, **stored: Any) -> Plan:
    body = labelled(label, field, **status("Running", **stored))
    return passed(body, ready(0), ready(1), queue=ADMITTED)


def texts(plan: Plan, reason: str) -> list[str]:
    return [event.message for event in plan.events if event.reason == reason]


@pytest.mark.parametrize(("label", "field"), [("team-a", None), (None, "team-a"), ("team-a", "team-a")])
def test_a_new_job_asks_the_queue_that_either_names(label: str | None, field: str | None) -> None:
    plan = passed(labelled(label, field))
    assert asked(plan) == [(QueueStep.CREATE, "team-a")]
    assert plan.status is not None
    assert plan.status.phase == "Queued"
    assert plan.status.queue_name == (label if field is None else None)


def test_an_empty_label_is_none() -> None:
    assert asked(passed(labelled(""))) == []


def test_two_queues_stall_the_job_with_both_values() -> None:
    plan = passed(labelled("team-b", "team-a"))
    assert plan.status is not None
    assert plan.status.phase == "Stalled"
    [text] = texts(plan, "InvalidSpec")
    assert "'team-a'" in text
    assert "'team-b'" in text
    assert asked(plan) == []


@pytest.mark.parametrize("label", ["Team_A", "a.b", "x" * 63 + "-"])
def test_a_label_that_is_no_name_of_a_queue_stalls_the_job(label: str) -> None:
    [text] = texts(passed(labelled(label)), "InvalidSpec")
    assert label in text


@pytest.mark.parametrize(
    ("label", "field", "stored", "shown"),
    [
        ("team-b", None, {"queueName": "team-a"}, "queue team-b"),
        (None, None, {"queueName": "team-a"}, "no queue"),
        ("team-b", "team-a", {}, "queue team-b"),
        ("team-b", None, {}, "queue team-b"),
    ],
)
def test_a_label_changed_while_the_job_runs_counts_later_with_one_event(
    label: str | None, field: str | None, stored: dict[str, Any], shown: str
) -> None:
    plan = running(label, field, **stored)
    assert plan.status is not None
    assert plan.status.phase == "Running"
    assert plan.status.queue_name == stored.get("queueName")
    assert plan.status.next_queue_name == (label or "")
    [text] = texts(plan, "QueueChanged")
    assert f"{LABEL}: {shown} counts from the next suspension" in text
    again = running(label, field, **stored, nextQueueName=label or "")
    assert texts(again, "QueueChanged") == []


def test_a_change_that_is_taken_back_is_forgotten() -> None:
    plan = running("team-a", queueName="team-a", nextQueueName="team-b")
    assert plan.status is not None
    assert plan.status.next_queue_name is None
    assert texts(plan, "QueueChanged") == []


def test_after_a_suspension_the_label_counts() -> None:
    body = labelled("team-b", **status("Suspended", queueName="team-a", nextQueueName="team-b"))
    plan = passed(body)
    assert plan.status is not None
    assert (plan.status.queue_name, plan.status.next_queue_name) == ("team-b", None)
    assert asked(plan) == [(QueueStep.CREATE, "team-b")]


def test_a_stalled_job_goes_on_once_the_label_is_corrected() -> None:
    plan = passed(labelled("team-a", **status("Stalled", queueName="Team_A")))
    assert asked(plan) == [(QueueStep.CREATE, "team-a")]


@pytest.mark.parametrize(("label", "field"), [("team-a", None), (None, "team-a")])
def test_the_metric_names_the_queue(label: str | None, field: str | None) -> None:
    stored: dict[str, Any] = {"queueName": label} if label else {}
    body = labelled(label, field, **status("Running", **stored))
    [info] = [labels for name, labels, _ in values_of(body) if name == "zerotrain_job_info"]
    assert info["queue"] == "team-a"
