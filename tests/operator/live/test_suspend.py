"""Suspend and resume of a live job: the checkpoint is durable before the pods go, nothing is done twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operator.kubelet_double import kubelet, wait_for_step
from tests.operator.live_job import LiveJob, check_attempts
from tests.operator.operator_process import KEY, operator
from tests.support.devcluster import Cluster
from tests.support.kube_json import KubeJson

pytestmark = pytest.mark.cluster


def test_suspends_through_a_checkpoint_and_resumes_at_that_step(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, steps=80, held=True) as double:
        job = LiveJob(control_plane, namespace)
        wait_for_step(double, 12)
        job.patch('{"suspend": true}')
        suspended = job.wait_for("Suspended")
        (first,) = double.trainings()
        assert first.yields_asked == 1, "asked through the channel, once"
        assert suspended["checkpoint"]["last"]["step"] == first.durable == first.step
        assert suspended["restarts"]["total"] == 0
        assert suspended["workers"]["running"] == 0
        assert not [name for name in job.owned() if name.startswith("Pod/")]
        job.patch('{"suspend": false}')
        resumed = job.wait_for("Running")
        assert resumed["attempt"] == 2
        double.may_end.set()
        job.wait_for("Completed")
        check_attempts(double, attempts=2)


def test_without_an_answer_sigterm_asks_for_the_same_checkpoint(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    silent = {"ZEROTRAIN_OPERATOR_CHANNEL": "silent"}
    with operator(operator_kubeconfig, tmp_path, silent), kubelet(api, namespace, KEY, held=True) as double:
        job = LiveJob(control_plane, namespace)
        wait_for_step(double, 12)
        job.patch('{"suspend": true}')
        suspended = job.wait_for("Suspended")
        (first,) = double.trainings()
        assert suspended["checkpoint"]["last"]["step"] == first.durable == first.step
        assert suspended["attempt"] == 1


def test_a_job_born_suspended_makes_nothing_until_it_is_resumed(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, steps=20) as double:
        job = LiveJob(control_plane, namespace, suspend=True)
        job.wait_for("Suspended")
        assert job.owned() == []
        job.patch('{"suspend": false}')
        job.wait_for("Completed")
        check_attempts(double, attempts=1)
