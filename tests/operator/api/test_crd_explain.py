"""`kubectl explain` and `kubectl get` show readable texts; numbers arrive as the job file's reader sees
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from ruamel.yaml import YAML

from tests.support.crd import applied_job, apply_all, install_crd
from tests.support.devcluster import Cluster
from zerotrain.operator.api import ZeroTrainingJob

pytestmark = pytest.mark.cluster

NUMBERS = [
    *("5e-6", "5e8", "1E3", "1e+3", "-2.5e-1", "0.1", ".5", "1.0", "0", "100", "-7", "1e400"),
    *("true", "false", "null", "~", "'5e8'", '"true"', "auto", "9007199254740993"),
]
"""Scalars of a configuration, as written in a job file."""


@pytest.fixture(scope="module")
def crd(control_plane: Cluster) -> Cluster:
    printed = install_crd(control_plane)
    # Another file of tests on this cluster may have applied it on the server's side.
    warnings = [line for line in printed.splitlines() if "Warning" in line]
    assert [line for line in warnings if "last-applied-configuration" not in line] == []
    return control_plane


@pytest.fixture(scope="module")
def jobs_namespace(crd: Cluster) -> Iterator[str]:
    with crd.namespace() as name:
        yield name


@pytest.mark.parametrize(
    ("field", "texts"),
    [
        ("spec.nvme", ["-required-", "AEAD", "/local_nvme unless given", "emptyDir", "Immutable"]),
        ("spec.resources", ["counted in", "page-lock", "/dev/shm"]),
        ("spec.checkpoint", ["everySteps", "newest durable one is never", "terminationGracePeriodSeconds"]),
        ("spec.failurePolicy", ["sliding window", "maxRestarts"]),
        ("spec.podTemplate.volumes", ["persistentVolumeClaim", "emptyDir", "nfs"]),
        ("status.conditions", ["kstatus", "lastTransitionTime"]),
    ],
)
def test_explain(crd: Cluster, field: str, texts: list[str]) -> None:
    printed = " ".join(crd.kubectl("explain", f"ztj.{field}").stdout.split())
    for text in texts:
        assert text in printed


def test_short_name_and_category(crd: Cluster, jobs_namespace: str) -> None:
    apply_all(crd, [applied_job("listed", jobs_namespace, {})])
    assert "zerotrainingjob.zerotrain.dev/listed" in crd.kubectl("get", "all", "-n", jobs_namespace).stdout
    wide = crd.kubectl("get", "ztj", "-n", jobs_namespace, "-o", "wide").stdout
    assert wide.split()[:11] == [
        *("NAME", "PHASE", "REASON", "STEP", "RANKS", "STAGE", "LOSS", "TOKENS/S", "RESTARTS"),
        *("CHECKPOINT", "AGE"),
    ]


def test_scale_subresource_reads_workers(crd: Cluster, jobs_namespace: str) -> None:
    apply_all(
        crd, [applied_job("scaled", jobs_namespace, {"spec.elastic": {"minWorkers": 1, "maxWorkers": 8}})]
    )
    crd.kubectl("scale", "ztj/scaled", "-n", jobs_namespace, "--replicas=5")
    assert crd.get("ztj", "scaled", "-n", jobs_namespace)["spec"]["workers"] == 5
    refused = crd.kubectl("scale", "ztj/scaled", "-n", jobs_namespace, "--replicas=9", check=False)
    assert "spec.workers" in refused.stderr


def test_a_full_status_is_stored_as_written(crd: Cluster, jobs_namespace: str) -> None:
    """The schema of the status prunes nothing that the models hold."""
    apply_all(crd, [applied_job("reported", jobs_namespace, {})])
    time = "2026-01-02T03:04:05Z"
    status = {
        "observedGeneration": 1,
        "phase": "Running",
        "attempt": 2,
        "startTime": time,
        "zeroStage": 3,
        "restarts": {
            "app": 1,
            "infra": 0,
            "preemption": 0,
            "total": 1,
            "recent": [{"time": time, "cause": "app"}],
        },
        "workers": {"desired": 2, "running": 2, "ready": 2, "summary": "2/2"},
        "ranks": {"desired": 4, "running": 4, "ready": 4, "summary": "4/4"},
        "selector": "zerotrain.dev/job=reported",
        "progress": {
            "step": 60,
            "totalSteps": 100,
            "loss": 2.25,
            "tokensPerSecond": 1200.5,
            "lastHeartbeat": time,
        },
        "checkpoint": {
            "last": {"step": 60, "path": "/checkpoints/reported/x", "time": time, "durable": True}
        },
        "failures": [
            {"attempt": 1, "time": time, "rank": 3, "node": "n", "exitCode": 137, "reason": "RankFailed"}
        ],
        "conditions": [
            {
                "type": "Ready",
                "status": "False",
                "reason": "NoStepYet",
                "message": "m",
                "lastTransitionTime": time,
                "observedGeneration": 1,
            }
        ],
    }
    patch = json.dumps({"status": status})
    where = ("-n", jobs_namespace)
    crd.kubectl("patch", "ztj", "reported", *where, "--subresource=status", "--type=merge", "-p", patch)
    stored = crd.get("ztj", "reported", *where)
    for key, value in status.items():
        assert stored["status"][key] == value
    assert ZeroTrainingJob.parse(stored).status.ranks.summary == "4/4"
    row = crd.kubectl("get", "ztj", "reported", *where, "-o", "wide", "--no-headers").stdout.split()
    assert row[:10] == ["reported", "Running", "NoStepYet", "60", "4/4", "3", "2.25", "1200.5", "1", "60"]


def test_numbers_mean_the_same_to_kubectl_and_to_us(crd: Cluster, jobs_namespace: str) -> None:
    readable = [text for text in NUMBERS if text != "1e400"]
    lines = "\n".join(f"    k{index}: {text}" for index, text in enumerate(readable))
    manifest = (
        "apiVersion: zerotrain.dev/v1alpha1\nkind: ZeroTrainingJob\nmetadata: {name: numbers}\n"
        f"spec:\n  image: x\n  command: [a]\n  steps: 1e3\n  config:\n{lines}\n"
    )
    crd.kubectl("apply", "-n", jobs_namespace, "-f", "-", input=manifest)
    stored = crd.get("ztj", "numbers", "-n", jobs_namespace)
    ours = YAML(typ="safe", pure=True).load(manifest)
    for index, text in enumerate(readable):
        theirs, mine = stored["spec"]["config"].get(f"k{index}"), ours["spec"]["config"][f"k{index}"]
        assert (text, theirs, isinstance(theirs, str)) == (text, mine, isinstance(mine, str))
    assert ZeroTrainingJob.parse(ours).spec.steps == stored["spec"]["steps"] == 1000
