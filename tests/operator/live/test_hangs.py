"""A hang on a live job is found and named, its stacks are kept, and only then the next attempt resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operator.kubelet_double import KubeletDouble, kubelet, wait_for_step
from tests.operator.live_job import LiveJob, check_attempts
from tests.operator.operator_process import KEY, operator
from tests.support.devcluster import Cluster, wait_until
from tests.support.kube_json import KubeJson
from zerotrain.contract.progress import Straggler

pytestmark = pytest.mark.cluster

POLICY = {"minTimeoutSeconds": 4, "startupTimeoutSeconds": 60}


RANK = 2
"""The first rank of worker 1."""


def stop_rank(double: KubeletDouble) -> None:
    double.trainings()[-1].stopped_rank = RANK


def test_a_stopped_rank_is_named_and_the_job_goes_on_from_its_checkpoint(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    with (
        operator(operator_kubeconfig, tmp_path) as process,
        kubelet(api, namespace, KEY, steps=10**6) as double,
    ):
        job = LiveJob(control_plane, namespace, hangPolicy=POLICY)
        wait_for_step(double, 2)
        double.trainings()[0].straggler = Straggler(rank=RANK, own_seconds=3.0, median_seconds=1.0)
        wait_until(lambda: job.status().get("straggler"), "the straggler in status", every_s=0.2)
        stop_rank(double)
        hung = wait_until(lambda: job.status().get("hang"), "the hang in status", every_s=0.1)
        assert (hung["rank"], hung["pod"], hung["node"]) == (RANK, "gpt-1-1", "double")
        # An event that is not sent yet is lost with the operator that is killed; the status says the same.
        job.events("Hang")
        # The finding survives the operator; the stacks are collected before any pod is deleted.
        process.kill()
        process.start()
        wait_until(lambda: job.status().get("attempt") == 2, "the second attempt")
        after = job.wait_for("Running")
        first = double.trainings()[0]
        assert set(first.stacks_asked) == {0, 1}
        check_attempts(double, attempts=2)
        (failure,) = after["failures"]
        assert (failure["reason"], failure["rank"], failure["attempt"]) == ("Hang", RANK, 1)
        assert after["restarts"]["app"] == after["restarts"]["total"] == 1
        assert "hang" not in after
        kept = control_plane.get("configmap", failure["stacks"], "-n", namespace)["data"]
        assert "rank 2\n  process: stopped by a signal" in kept["summary.txt"]
        assert set(kept) == {"summary.txt", "worker-0.txt", "worker-1.txt"}
        events = job.events("Hang", "Straggler")
        assert sum(1 for reason, text in events if reason == "Hang" and "collecting the stacks" in text) == 1
        assert any(reason == "Straggler" and "rank 2 (pod gpt-1-1" in text for reason, text in events)


def test_action_report_emits_an_event_and_leaves_the_attempt_alone(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, steps=10**6) as double:
        job = LiveJob(control_plane, namespace, hangPolicy={**POLICY, "action": "Report"})
        wait_for_step(double, 3)
        stop_rank(double)
        wait_until(lambda: (job.status().get("hang") or {}).get("stacks"), "the stacks", every_s=0.2)
        assert job.condition("Hung")["status"] == "True"
        assert job.status()["phase"] == "Running"
        double.trainings()[0].stopped_rank = None
        wait_until(lambda: job.condition("Hung")["status"] == "False", "the end of the alarm")
        assert job.status()["attempt"] == 1
        assert job.events("HangOver")
