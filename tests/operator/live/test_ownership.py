"""Live jobs against other owners, quotas, nodes that do not answer, and deletion while no operator runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.operator.kubelet_double import kubelet, wait_for_step
from tests.operator.live_job import LiveJob, check_attempts
from tests.operator.operator_process import KEY, operator
from tests.support.devcluster import Cluster, wait_until
from tests.support.kube_json import KubeJson
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.resources import service_name

pytestmark = pytest.mark.cluster


def wait_for_reason(job: LiveJob, reason: str) -> str:
    """Return the message of Reconciling once it has this reason."""

    def there() -> str | None:
        found = job.condition("Reconciling")
        return str(found["message"]) if found.get("reason") == reason else None

    return str(wait_until(there, f"Reconciling to say {reason}", every_s=0.25))


def test_a_name_that_is_taken_is_reported_and_waited_for(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    services = f"/api/v1/namespaces/{namespace}/services"
    job = LiveJob(control_plane, namespace)
    name = service_name(ZeroTrainingJob.parse(job.object()))
    api.post(services, {"metadata": {"name": name}, "spec": {"ports": [{"port": 80}]}})
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, steps=10) as double:
        assert f"Service {name} belongs to another owner; delete it" in wait_for_reason(job, "NameTaken")
        assert not double.created
        control_plane.kubectl("delete", "service", name, "-n", namespace)
        job.wait_for("Completed")
        check_attempts(double, attempts=1)


def test_a_quota_is_reported_and_waited_for(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    control_plane.kubectl("create", "quota", "small", "--hard=pods=1", "-n", namespace)
    with kubelet(api, namespace, KEY, steps=10) as double, operator(operator_kubeconfig, tmp_path):
        job = LiveJob(control_plane, namespace)
        assert "exceeded quota" in wait_for_reason(job, "QuotaExceeded")
        control_plane.kubectl("delete", "quota", "small", "-n", namespace)
        job.wait_for("Completed")
        check_attempts(double, attempts=1)


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ("scheduling", "priorityClassName"),
        ("podTemplate", "runtimeClassName"),
        ("podTemplate", "serviceAccountName"),
    ],
)
def test_an_object_that_is_missing_is_named_with_its_field(
    control_plane: Cluster,
    namespace: str,
    operator_kubeconfig: Path,
    tmp_path: Path,
    part: str,
    field: str,
) -> None:
    """The API server's words are those by which the field is found."""
    with operator(operator_kubeconfig, tmp_path):
        spec: dict[str, Any] = {part: {field: "missing"}}
        job = LiveJob(control_plane, namespace, **spec)
        message = wait_for_reason(job, "ApiRefused")
        assert "missing" in message
        assert f"spec.{part}.{field}" in message
        assert job.condition("Stalled")["status"] == "True"
        if field == "serviceAccountName":
            control_plane.kubectl("create", "serviceaccount", "missing", "-n", namespace)
            wait_until(lambda: job.status().get("podsCreated"), "the pods", every_s=0.25)
            assert job.condition("Stalled")["status"] == "False"


def test_a_node_that_does_not_answer_costs_the_timeout_and_no_more(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, held=True) as double:
        job = LiveJob(control_plane, namespace, runPolicy__terminationTimeoutSeconds=2)
        wait_for_step(double, 10)
        double.obeys_sigterm = False
        double.end("gpt-1-0", 137)
        double.may_end.set()
        done = job.wait_for("Completed")
        check_attempts(double, attempts=2)
        assert done["restarts"]["app"] == 1


def test_time_to_live_deletes_the_job_and_what_it_owns(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, steps=10):
        job = LiveJob(control_plane, namespace, runPolicy__ttlSecondsAfterFinished=1)
        listed = ("get", "ztj", "-n", namespace, "-o", "name")
        wait_until(lambda: control_plane.kubectl(*listed).stdout == "", "the job to go")
        wait_until(lambda: not job.owned(), "its objects to go")


def test_a_job_that_is_deleted_with_the_operator_down_leaves_nothing(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    with kubelet(api, namespace, KEY, held=True):
        with operator(operator_kubeconfig, tmp_path):
            job = LiveJob(control_plane, namespace)
            job.wait_for("Running")
        control_plane.kubectl("delete", "ztj", "gpt", "-n", namespace, "--timeout=100s")
        wait_until(lambda: not job.owned(), "its objects to go")


def test_a_namesake_of_a_deleted_job_starts_afresh(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    """The deleted job's pods are still Terminating: they are neither adopted nor counted."""
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, steps=40, held=True) as double:
        first = LiveJob(control_plane, namespace)
        first.wait_for("Running")
        double.obeys_sigterm = False
        control_plane.kubectl("delete", "ztj", "gpt", "-n", namespace)
        second = LiveJob(control_plane, namespace)
        assert "belongs to another owner" in wait_for_reason(second, "NameTaken")
        double.obeys_sigterm = True
        double.may_end.set()
        done = second.wait_for("Completed")
        assert done["attempt"] == 1
        assert done["restarts"]["total"] == 0
