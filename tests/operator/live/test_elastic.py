"""A live job is resized with `kubectl scale`: an attempt per size, the same batch, from the same step."""

from __future__ import annotations

import base64
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.operator.kubelet_double import kubelet, wait_for_step
from tests.operator.live_job import LiveJob
from tests.operator.operator_process import KEY, operator
from tests.support.devcluster import Cluster, wait_until
from tests.support.kube_json import KubeJson

pytestmark = pytest.mark.cluster

STEPS = 10**6
ELASTIC = {"minWorkers": 1, "maxWorkers": 8}
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def test_every_size_keeps_the_batch_and_goes_on_at_the_step(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, steps=STEPS) as double:
        job = LiveJob(control_plane, namespace, elastic=ELASTIC, steps=STEPS, config__train_batch_size=8)

        def scale(workers: int) -> None:
            control_plane.kubectl("scale", "ztj", "gpt", "-n", namespace, f"--replicas={workers}")

        wait_for_step(double, 5)
        scale(1)
        wait_until(lambda: len(double.trainings()) == 2, "the smaller attempt")
        wait_for_step(double, double.trainings()[-1].first + 5)
        scale(3)
        refusal = dict(job.events("ResizeRefused"))["ResizeRefused"]
        assert "Numbers of ranks that divide it are 1, 2, 4, 8." in refusal
        job.patch('{"suspend": true}')
        job.wait_for("Suspended")
        scale(4)
        job.patch('{"suspend": false}')
        resumed = job.wait_for("Running")
        assert resumed["workers"] == {**resumed["workers"], "desired": 4, "ready": 4}
        assert resumed["restarts"]["total"] == 0
        trainings = double.trainings()
        assert [training.attempt for training in trainings] == [1, 2, 3]
        for earlier, later in pairwise(trainings):
            assert later.first == earlier.durable == earlier.step
        assert not double.overlaps
        pods = Counter(name.split("-")[1] for name, _ in double.created)
        assert pods == {"1": 2, "2": 1, "3": 4}
        assert batches(control_plane, namespace) == {
            "gpt-1-files": (8, 1, 2),
            "gpt-2-files": (8, 1, 4),
            "gpt-3-files": (8, 1, 1),
        }


def batches(cluster: Cluster, namespace: str) -> dict[str, tuple[int, ...]]:
    """Return global batch, micro batch and accumulation by the name of the Secret, without its hash."""
    found = {}
    for item in cluster.get("secrets", "-n", namespace)["items"]:
        if "ds_config.json" in item.get("data", {}):
            config = json.loads(base64.b64decode(item["data"]["ds_config.json"]))
            found[item["metadata"]["name"].rpartition("-")[0]] = tuple(config[name] for name in BATCH)
    return found
