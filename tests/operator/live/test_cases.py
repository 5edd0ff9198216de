"""Live cases that other test suites have, too: a job applied again, deleted in the foreground, past its
deadline.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.operator.kubelet_double import kubelet, wait_for_step
from tests.operator.live_job import LiveJob, check_attempts
from tests.operator.operator_process import KEY, operator
from tests.support.devcluster import Cluster, wait_until
from tests.support.jobs import job_json
from tests.support.kube_json import KubeJson

pytestmark = pytest.mark.cluster

HOLD_S = 4.0
"""Seconds to hold a job; an attempt whose pods went away is followed by the next one within a second or
two.
"""


@pytest.mark.parametrize(
    "how", [("--server-side", "--force-conflicts"), ()], ids=["server-side", "client-side"]
)
def test_a_job_that_is_applied_again_is_the_same_job(
    control_plane: Cluster,
    namespace: str,
    operator_kubeconfig: Path,
    api: KubeJson,
    tmp_path: Path,
    how: tuple[str, ...],
) -> None:
    """The schema's defaults are not taken for a change, and no attempt is begun for them."""
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, held=True) as double:
        job = LiveJob(control_plane, namespace)
        wait_for_step(double, 10)
        job.wait_for("Running")
        file = tmp_path / "job.json"
        file.write_text(json.dumps(job_json({"metadata": {"name": job.name, "namespace": namespace}})))
        for _ in range(2):
            control_plane.kubectl("apply", "-f", str(file), *how)
        assert job.object()["metadata"]["generation"] == 1
        double.may_end.set()
        assert job.wait_for("Completed")["attempt"] == 1
        check_attempts(double, attempts=1)


def test_a_deletion_in_the_foreground_takes_the_pods_first_and_makes_none(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    """A foreign finalizer holds the job for longer than an operator takes to begin another attempt."""
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, held=True) as double:
        job = LiveJob(control_plane, namespace)
        wait_for_step(double, 10)
        hold(job, ["test.example/hold"])
        delete = ("delete", "ztj", job.name, "-n", namespace, "--cascade=foreground")
        control_plane.kubectl(*delete, "--wait=false")
        wait_until(lambda: not job.owned(), "its objects to go")
        time.sleep(HOLD_S)
        assert job.object()["metadata"]["deletionTimestamp"]
        assert not job.owned()
        check_attempts(double, attempts=1)
        hold(job, [])
        listed = ("get", "ztj", "-n", namespace, "-o", "name")
        wait_until(lambda: control_plane.kubectl(*listed).stdout == "", "the job to go")


def hold(job: LiveJob, added: list[str]) -> None:
    """Set these finalizers on the job, beside the garbage collector's own."""
    found = job.object()["metadata"].get("finalizers", [])
    finalizers = [each for each in found if not each.startswith("test.example/")] + added
    patch = json.dumps({"metadata": {"finalizers": finalizers}})
    job.cluster.kubectl("patch", "ztj", job.name, "-n", job.namespace, "--type=merge", "-p", patch)


def test_a_job_past_its_deadline_fails_and_its_pods_go(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, held=True) as double:
        job = LiveJob(control_plane, namespace, runPolicy__activeDeadlineSeconds=3)
        job.wait_for("Failed")
        assert job.condition("Failed")["reason"] == "DeadlineExceeded"
        wait_until(lambda: not [name for name in job.owned() if name.startswith("Pod/")], "its pods to go")
        check_attempts(double, attempts=1)
