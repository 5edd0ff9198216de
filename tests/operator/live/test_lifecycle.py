"""A job from apply to deletion on a real API server: objects, status, events, restart, refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operator.kubelet_double import kubelet, wait_for_step
from tests.operator.live_job import LiveJob, check_attempts
from tests.operator.operator_process import KEY, operator
from tests.support.devcluster import Cluster, wait_until
from tests.support.kube_json import KubeJson

pytestmark = pytest.mark.cluster


def test_runs_to_completion_and_goes_without_a_trace(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    with (
        operator(operator_kubeconfig, tmp_path) as process,
        kubelet(api, namespace, KEY, steps=60, held=True) as double,
    ):
        job = LiveJob(control_plane, namespace)
        running = job.wait_for("Running")
        assert running["attempt"] == 1
        assert running["ranks"] == {"desired": 4, "running": 4, "ready": 4, "summary": "4/4"}
        policy, *pods, secret, service = job.owned()
        assert (policy, pods) == ("NetworkPolicy/gpt", ["Pod/gpt-1-0", "Pod/gpt-1-1"])
        assert secret.startswith("Secret/gpt-1-files-")
        assert service.startswith("Service/gpt-")
        double.may_end.set()
        done = job.wait_for("Completed")
        assert done["checkpoint"]["last"]["step"] == 60
        assert job.condition("Complete")["status"] == "True"
        check_attempts(double, attempts=1)
        assert sorted(reason for reason, _ in job.events("AllRanksJoined", "Completed")) == [
            "AllRanksJoined",
            "Completed",
        ]
        assert 'zerotrain_operator_jobs{phase="Completed"}' in process.get("/metrics")
        control_plane.kubectl("delete", "ztj", "gpt", "-n", namespace)
        wait_until(lambda: not job.owned(), "the job's objects to go")


def test_restarts_all_ranks_from_the_last_durable_step(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, held=True) as double:
        job = LiveJob(control_plane, namespace)
        wait_for_step(double, 20)
        double.end("gpt-1-1", 137, reason="OOMKilled", exception="killed")
        double.may_end.set()
        done = job.wait_for("Completed")
        check_attempts(double, attempts=2)
        assert done["attempt"] == 2
        assert done["restarts"]["app"] == 1
        (failure,) = done["failures"]
        assert (failure["pod"], failure["exitCode"], failure["reason"]) == ("gpt-1-1", 137, "OutOfMemory")
        assert (failure["rank"], failure["node"]) == (2, "double")
        messages = [message for reason, message in job.events("OutOfMemory") if reason == "OutOfMemory"]
        assert len(messages) == 1
        assert "worker 1 (rank 2, pod gpt-1-1, node double): exit code 137" in messages[0]


def test_a_code_that_the_user_must_answer_ends_the_job(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, held=True) as double:
        job = LiveJob(control_plane, namespace)
        job.wait_for("Running")
        double.end("gpt-1-0", 65, exception="data.path /data is empty")
        job.wait_for("Failed")
        assert "data.path /data is empty" in job.condition("Failed")["message"]
        wait_until(lambda: job.owned().count("Pod/gpt-1-1") == 0, "the live worker to be ended")
        assert "Pod/gpt-1-0" in job.owned()
        check_attempts(double, attempts=1)


def test_a_refused_spec_creates_nothing_until_it_is_corrected(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, steps=20) as double:
        job = LiveJob(control_plane, namespace, config__train_batch_size=3)
        job.wait_for("Stalled")
        stalled = job.condition("Stalled")
        assert stalled["reason"] == "InvalidSpec"
        assert "spec.config.train_batch_size" in stalled["message"]
        assert job.owned() == []
        job.patch('{"suspend": true, "config": {"train_batch_size": 4}}')
        job.patch('{"suspend": false}')
        job.wait_for("Completed")
        check_attempts(double, attempts=1)


def test_a_deleted_pod_makes_all_ranks_yield_and_go_on(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, held=True) as double:
        job = LiveJob(control_plane, namespace)
        wait_for_step(double, 20)
        control_plane.kubectl("delete", "pod", "gpt-1-0", "-n", namespace, "--wait=false")
        wait_until(lambda: len(double.trainings()) == 2, "the second attempt")
        double.may_end.set()
        done = job.wait_for("Completed")
        check_attempts(double, attempts=2)
        assert done["restarts"]["preemption"] == 1
        assert done["restarts"]["app"] == done["restarts"]["infra"] == 0
