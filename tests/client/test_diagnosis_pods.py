"""Advice of `describe` about pods that are refused, do not start or do not terminate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.job_states import NOW, condition, event, failure, job, stamp
from zerotrain.client import Event, Pod
from zerotrain.client.diagnosis import diagnose

pytestmark = pytest.mark.unit

CREATING = {"waiting": {"reason": "ContainerCreating"}}


def pod(state: dict[str, Any] | None = None, *, age_s: float = 90, **meta: Any) -> Pod:
    labels = {"zerotrain.dev/job": "gpt", "zerotrain.dev/attempt": "2", "zerotrain.dev/rank": "0"}
    made = {"name": "gpt-2-0", "namespace": "ml", "labels": labels, "creationTimestamp": stamp(age_s)}
    status = {"phase": "Pending", "containerStatuses": [{"name": "worker", "state": state or CREATING}]}
    return Pod.of({"metadata": {**made, **meta}, "spec": {"nodeName": "node-a"}, "status": status})


def advice(
    phase: str,
    reason: str,
    message: str = "",
    events: Sequence[Event] = (),
    pods: Sequence[Pod] = (),
    **status: Any,
) -> str:
    state = {"phase": phase, "conditions": [condition("Reconciling", "True", reason, message)], **status}
    found = diagnose(job(state), events, pods, now=NOW)
    return "\n".join(f"{item.text} $ {item.command}" for item in found.advice)


@pytest.mark.parametrize(
    ("reason", "message", "command"),
    [
        ("QuotaExceeded", "exceeded quota: q", "kubectl -n ml describe resourcequota"),
        ("ApiRefused", "no PriorityClass with name high was found", "kubectl -n ml edit ztj gpt"),
        (
            "NameTaken",
            "NetworkPolicy gpt belongs to another owner; delete it or rename the job",
            "kubectl -n ml get networkpolicy gpt -o yaml",
        ),
    ],
)
def test_each_refusal_has_its_own_next_step(reason: str, message: str, command: str) -> None:
    text = advice("Pending", reason, message)
    assert command in text
    assert ("resourcequota" in text) == (reason == "QuotaExceeded")


def test_an_init_container_that_runs_for_long_may_wait_for_the_network() -> None:
    text = advice("Pending", "InitContainerRuns", "worker 0 (pod gpt-2-0): init container fetch runs")
    assert "An init container has run for minutes" in text
    assert "spec.network.egressCidrs" in text
    assert "kubectl -n ml get networkpolicy gpt -o yaml" in text


@pytest.mark.parametrize("message", ["", "NetworkPolicy", "Network;rm -rf gpt x", "NetworkPolicy $(id) x"])
def test_no_command_is_made_of_what_is_no_name(message: str) -> None:
    assert "kubectl" not in advice("Pending", "NameTaken", message)


def test_the_kubelets_words_on_a_mount_are_the_next_step() -> None:
    mount_failure = event("FailedMount", 'configmap "ds" not found', warning=True, pod="gpt-2-0")
    other = event("FailedMount", 'configmap "old" not found', warning=True, pod="gpt-1-0")
    text = advice("Pending", "WaitingForPods", events=[mount_failure, other], pods=[pod()])
    assert 'Pod gpt-2-0 cannot start: configmap "ds" not found.' in text
    assert "old" not in text
    assert "kubectl -n ml describe pod gpt-2-0" in text


@pytest.mark.parametrize(("age_s", "is_advised"), [(30, False), (90, True)])
def test_a_pod_that_does_not_start_needs_action(age_s: float, is_advised: bool) -> None:
    found = advice("Pending", "WaitingForPods", pods=[pod(age_s=age_s)])
    assert ("Pod gpt-2-0 has a node and has not started" in found) is is_advised


def test_a_finalizer_and_its_pod_are_named() -> None:
    kept = pod({"terminated": {"exitCode": 1}}, deletionTimestamp=stamp(60), finalizers=["example.com/audit"])
    text = advice("Restarting", "PodHeld", pods=[kept])
    assert text.startswith("Pod gpt-2-0 is held by finalizer example.com/audit")
    assert "kubectl -n ml patch pod gpt-2-0" in text
    fine = pod(finalizers=["example.com/audit"], age_s=1)
    assert "finalizer" not in advice("Pending", "WaitingForPods", pods=[fine])


def test_the_code_of_an_init_container_means_nothing_of_ours() -> None:
    failed = failure(2, container="fetch-data", exitCode=65, reason="InitContainerFailed", rank=None)
    text = advice("Failed", "Failed", failures=[failed])
    assert "Init container fetch-data of spec.podTemplate failed before any rank started" in text
    assert "Exit code 65" not in text
    assert "Read what fetch-data wrote last." in text
