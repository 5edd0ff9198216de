"""Specs that no reader accepts, stored before the operator starts and while it runs.

A job of another namespace gets its pods, the operator is healthy and small, and each such job reports what is
wrong with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.operator.live_job import LiveJob
from tests.operator.operator_process import OperatorProcess, operator
from tests.support.devcluster import Cluster, wait_until
from tests.support.jobs import job_json

SIBLING = (
    "tests/operator/cluster/test_bad_objects.py::"
    "test_jobs_behind_one_that_is_deep_and_one_that_is_fat_are_listed"
)
pytestmark = [pytest.mark.cluster, pytest.mark.slow(cheaper=SIBLING)]

JOBS = "/apis/zerotrain.dev/v1alpha1/namespaces/{}/zerotrainingjobs"
FAT = 12
MAX_GROWTH = 64 << 20

HOSTILE = {
    "deep": '{"a":' * 3000 + "{}" + "}" * 3000,
    "lesser": '{"a":' * 600 + "{}" + "}" * 600,
    "lists": '{"a":' + "[" * 1010 + "]" * 1010 + "}",
    "slow": '{"train_micro_batch_size_per_gpu":1,"x":[' + ",".join(["[[[[]]]]"] * 100_000) + "]}",
    "many": '{"x":[' + ",".join(["{}"] * 20_000) + "]}",
    "posing": '{"x":['
    + ",".join(['{"metadata":{"uid":"u"},"status":{"phase":"Completed"}}'] * 15_000)
    + "]}",
}
FAT_CONFIG = '{"x":[' + ",".join(["{}"] * 450_000) + "]}"


def store(cluster: Cluster, folder: Path, namespace: str, name: str, config: str, *, suspend: bool) -> None:
    body = job_json({"metadata": {"name": name, "namespace": namespace}})
    body["spec"] |= {"config": "CONFIG", "suspend": suspend}
    file = folder / f"{name}.json"
    file.write_text(json.dumps(body).replace('"CONFIG"', config))
    cluster.kubectl("create", "--raw", JOBS.format(namespace), "-f", str(file))
    file.unlink()


def peak_bytes(process: OperatorProcess) -> int:
    text = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) << 10


@contextmanager
def other_tenant(cluster: Cluster, name: str) -> Iterator[None]:
    """Check that a job of another tenant gets its pods before the block starts, whatever else is stored."""
    with cluster.namespace() as namespace:
        LiveJob(cluster, namespace, name)

        def pods() -> bool:
            return bool(cluster.get("pods", "-n", namespace)["items"])

        wait_until(pods, "pods of another tenant's job")
        yield


def condition_of(cluster: Cluster, namespace: str, name: str) -> str:
    """Return status, reason and message of the job's condition Stalled."""
    path = "{range .status.conditions[?(@.type=='Stalled')]}{.status} {.reason} {.message}{end}"
    return cluster.kubectl("get", "ztj", name, "-n", namespace, "-o", f"jsonpath={path}").stdout


def check_refused(cluster: Cluster, namespace: str, process: OperatorProcess, names: list[str]) -> None:
    for name in names:
        found = wait_until(lambda name=name: condition_of(cluster, namespace, name), f"a condition of {name}")
        assert found.startswith("True InvalidSpec spec"), (name, found)
        assert "spec.config" in found, name
    assert process.get("/healthz"), process.tail()
    assert process.get("/readyz"), process.tail()
    assert "Traceback" not in process.log.read_text()


def test_hostile_specs_affect_no_other_job(
    control_plane: Cluster, operator_kubeconfig: Path, namespace: str, tmp_path: Path
) -> None:
    cluster = control_plane
    with operator(operator_kubeconfig, tmp_path) as process, other_tenant(cluster, "first"):
        calm = peak_bytes(process)
    for name, config in HOSTILE.items():
        store(cluster, tmp_path, namespace, name, config, suspend=False)
    for number in range(FAT):
        store(cluster, tmp_path, namespace, f"fat-{number}", FAT_CONFIG, suspend=True)
    process.log.write_text("")
    with (
        operator(operator_kubeconfig, tmp_path, {"ZEROTRAIN_OPERATOR_RESYNC_SECONDS": "20"}) as process,
        other_tenant(cluster, "second"),
    ):
        check_refused(cluster, namespace, process, [*HOSTILE, "fat-0", f"fat-{FAT - 1}"])
        for name, config in HOSTILE.items():
            store(cluster, tmp_path, namespace, f"late-{name}", config, suspend=True)
        with other_tenant(cluster, "third"):
            check_refused(cluster, namespace, process, [f"late-{name}" for name in HOSTILE])
        cluster.kubectl("label", "ztj", *HOSTILE, "fat-0", "-n", namespace, "touched=yes")
        cluster.kubectl("delete", "ztj", "late-deep", "-n", namespace)
        with other_tenant(cluster, "fourth"):
            check_refused(cluster, namespace, process, list(HOSTILE))
        assert peak_bytes(process) - calm <= MAX_GROWTH
    cluster.kubectl("delete", "ztj", "--all", "-n", namespace, "--wait=false")
