"""Messages to users name the smallest change that helps, and blame no component without cause."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import NOW, going, job, ready, seen, status
from zerotrain.operator.cluster.actions.rejections import name_taken, rejection_of
from zerotrain.operator.cluster.errors import Forbidden
from zerotrain.operator.reconcile import PodView, reconcile

pytestmark = pytest.mark.unit

Json = dict[str, Any]


@pytest.mark.parametrize(
    ("level", "violation", "least"),
    [
        ("restricted", 'restricted volume types (volume "d" uses restricted volume type "nfs")', "baseline"),
        ("restricted", "runAsNonRoot != true (pod must set securityContext.runAsNonRoot=true)", "baseline"),
        ("restricted", 'unrestricted capabilities (container must not include "IPC_LOCK")', "privileged"),
        ("restricted", 'hostPath volumes (volume "x"), restricted volume types (...)', "privileged"),
        ("restricted", "host namespaces (hostNetwork=true)", "privileged"),
        ("baseline", 'non-default capabilities (container must not include "IPC_LOCK")', "privileged"),
    ],
)
def test_the_least_level_of_pod_security_that_suffices(level: str, violation: str, least: str) -> None:
    message = f'pods "gpt-1-0" is forbidden: violates PodSecurity "{level}:latest": {violation}'
    item = {"kind": "Pod", "metadata": {"name": "gpt-1-0", "namespace": "ml"}}
    refused = rejection_of(Forbidden(message, status=403), item)
    assert f"enforce={least} --overwrite" in refused.problem.message


@pytest.mark.parametrize(
    ("cause", "field"),
    [
        ('pod rejected: RuntimeClass "kata" not found', "spec.podTemplate.runtimeClassName"),
        ("no PriorityClass with name high was found", "spec.scheduling.priorityClassName"),
        (
            'error looking up service account ml/runner: serviceaccount "runner" not found',
            "spec.podTemplate.serviceAccountName",
        ),
        ("failed quota: team: must specify limits.memory for: worker", "spec.resources"),
        ("maximum memory usage per Container is 4Gi, but limit is 8Gi", "spec.resources"),
        ("[maximum memory usage per Pod is 5Gi, but limit is 8Gi, and another]", "LimitRange"),
        ("minimum cpu usage per Container is 100m, but request is 50m", "spec.resources"),
        ("cpu max limit to request ratio per Container is 2, but provided ratio is 5.0", "spec.podTemplate"),
    ],
)
def test_a_refusal_by_admission_names_the_field_that_it_is_about(cause: str, field: str) -> None:
    item = {"kind": "Pod", "metadata": {"name": "gpt-1-0", "namespace": "ml"}}
    refused = rejection_of(Forbidden(f'pods "gpt-1-0" is forbidden: {cause}', status=403), item)
    assert f"{cause}. " in refused.problem.message
    assert field in refused.problem.message
    assert refused.problem.lasting


@pytest.mark.parametrize(
    "cause",
    [
        "status unknown for quota: team, resources: requests.cpu",
        'error looking up service account ml/default: serviceaccount "default" not found',
    ],
)
def test_what_passes_by_itself_in_a_new_namespace_stalls_no_job(cause: str) -> None:
    """Tools that wait for the object give up when they see Stalled."""
    item = {"kind": "Pod", "metadata": {"name": "gpt-1-0", "namespace": "ml"}}
    refused = rejection_of(Forbidden(f'pods "gpt-1-0" is forbidden: {cause}', status=403), item)
    assert not refused.problem.lasting
    assert cause in refused.problem.message


def policy(labels: Json, **meta: Any) -> Json:
    return {"kind": "NetworkPolicy", "metadata": {"name": "gpt", "labels": labels, **meta}}


def test_an_orphan_of_an_earlier_job_is_distinguished_from_objects_of_other_owners() -> None:
    """An orphaned policy still applies to pods that may train: deleting it first would open them."""
    labels = {"zerotrain.dev/job": "gpt", "zerotrain.dev/job-uid": "old"}
    message = name_taken(policy(labels)).problem.message
    assert message.startswith("NetworkPolicy gpt is left over from an earlier job gpt (uid old)")
    assert "kubectl delete pods -l zerotrain.dev/job-uid=old" in message
    for other in (policy({}), policy(labels, ownerReferences=[{"uid": "other"}])):
        assert "belongs to another owner" in name_taken(other).problem.message


def lost(*pods: PodView, gone: PodView | None = None) -> str:
    made = job(status=status("Running"))
    plan = reconcile(made, seen(*pods, gone=(gone,) if gone is not None else ()), NOW)
    assert plan.status is not None
    return plan.status.failures[0].message


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        (going(0, asked_s_ago=5), "the pod was deleted, not by the operator"),
        (
            going(0, asked_s_ago=5, disruption="EvictionByEvictionAPI"),
            "the pod was deleted (EvictionByEvictionAPI)",
        ),
        (ready(0), "the pod is gone"),
    ],
)
def test_a_deleted_pod_is_not_blamed_on_its_node(pod: PodView, message: str) -> None:
    assert lost(ready(1), gone=pod) == message


@pytest.mark.parametrize(
    ("finalizers", "message"),
    [
        ((), "its node does not finish the deletion of the pod"),
        (("example.com/audit",), "the pod was deleted and is held by finalizer example.com/audit"),
    ],
)
def test_the_message_names_what_keeps_a_pod(finalizers: tuple[str, ...], message: str) -> None:
    assert lost(going(0, asked_s_ago=200, finalizers=finalizers), ready(1)) == message
