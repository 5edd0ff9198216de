"""Validation rejects what the API server cannot check, with the field's path, the rule and the way out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import ABSENT, make_job
from zerotrain.operator.api.validation import refusals
from zerotrain.operator.constants import Reason

pytestmark = pytest.mark.unit


EMPTY_DIR = {"name": "data", "emptyDir": {}}
MOUNTED = {"spec.podTemplate.volumes": [EMPTY_DIR]}
OFFLOAD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/a"}},
}


def spilled(**spill: Any) -> dict[str, Any]:
    """Return a configuration with states on nvme and this `spill` block."""
    block = {"stage": 1, "offload_optimizer": {"device": "nvme"}, "spill": spill}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": block}


INVALID: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "unknown-key",
        {"spec.config.zero_optimisation": {"stage": 3}},
        "spec.config.zero_optimisation",
        "zero_optimization",
    ),
    (
        "nested-key",
        {"spec.config.zero_optimization": {"stagee": 3}},
        "spec.config.zero_optimization.stagee",
        "stage",
    ),
    ("stage", {"spec.config.zero_optimization": {"stage": 4}}, "spec.config.zero_optimization.stage", "4"),
    ("batch", {"spec.config": {"train_batch_size": 6}}, "spec.config.train_batch_size", "Take 4 or 8"),
    (
        "second-copies",
        {"spec.config.zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}},
        "spec.config.zero_optimization.zero_hpz_partition_size",
        "must divide the 4 ranks of the job; got 3",
    ),
    (
        "nvme-path",
        {"spec.config": OFFLOAD, "spec.nvme": {"size": "1Ti", "mountPath": "/mnt/b"}},
        "spec.config.zero_optimization.offload_optimizer.nvme_path",
        "/mnt/a is not spec.nvme.mountPath /mnt/b",
    ),
    (
        "encryption",
        {"spec.config": spilled(encryption="AEAD"), "spec.nvme": {"size": "1Ti", "encryption": "None"}},
        "spec.config.zero_optimization.spill.encryption",
        "AEAD is not spec.nvme.encryption None",
    ),
    (
        "spill-folder",
        {"spec.config": spilled(paths=["/local_nvme", "/data"]), "spec.nvme": {"size": "1Ti"}},
        "spec.config.zero_optimization.spill.paths",
        "/data is not on spec.nvme.mountPath /local_nvme",
    ),
    (
        "spill-bytes",
        {"spec.config": spilled(max_bytes=2**40), "spec.nvme": {"size": "1Ti"}},
        "spec.config.zero_optimization.spill.max_bytes",
        "do not fit spec.nvme.size 1Ti",
    ),
    ("preset", {"spec.model": {"preset": "gpt-6m"}}, "spec.model.preset", "take one of gpt-1m, gpt-5m"),
    ("no-nvme", {"spec.config": OFFLOAD}, "spec.nvme", "add spec.nvme"),
    (
        "memory",
        {"spec.resources": {"memory": "8Gi", "pinnedMemory": "6Gi", "sharedMemory": "2Gi"}},
        "spec.resources.memory",
        "8Gi must exceed pinnedMemory 6Gi + sharedMemory 2Gi = 8Gi",
    ),
    (
        "less-disk-than-nvme",
        {"spec.nvme": {"size": "1Ti"}, "spec.scratch": {"ephemeralStorage": "100Gi"}},
        "spec.scratch.ephemeralStorage",
        "100Gi is less than spec.nvme.size 1Ti",
    ),
    (
        "nvme-mount",
        {"spec.nvme": {"size": "1Ti", "mountPath": "/checkpoints/nvme"}},
        "spec.nvme.mountPath",
        "collides with /checkpoints",
    ),
    (
        "unknown-volume",
        {**MOUNTED, "spec.podTemplate.volumeMounts": [{"name": "date", "mountPath": "/data"}]},
        "spec.podTemplate.volumeMounts[0].name",
        "no volume 'date' in spec.podTemplate.volumes (it holds data)",
    ),
    (
        "sidecar-volume",
        {
            "spec.podTemplate.sidecars": [
                {"name": "s", "image": "i", "volumeMounts": [{"name": "x", "mountPath": "/x"}]}
            ]
        },
        "spec.podTemplate.sidecars[0].volumeMounts[0].name",
        "it holds none",
    ),
    (
        "reserved-mount",
        {**MOUNTED, "spec.podTemplate.volumeMounts": [{"name": "data", "mountPath": "/dev/shm"}]},
        "spec.podTemplate.volumeMounts[0].mountPath",
        "/dev/shm collides",
    ),
    (
        "mount-above-ours",
        {**MOUNTED, "spec.podTemplate.volumeMounts": [{"name": "data", "mountPath": "/etc"}]},
        "spec.podTemplate.volumeMounts[0].mountPath",
        "/etc collides with /etc/zerotrain",
    ),
    (
        "nvme-twice",
        {
            **MOUNTED,
            "spec.nvme": {"size": "1Ti"},
            "spec.podTemplate.volumeMounts": [{"name": "data", "mountPath": "/local_nvme"}],
        },
        "spec.podTemplate.volumeMounts[0].mountPath",
        "/local_nvme collides",
    ),
    (
        "container-twice",
        {
            "spec.podTemplate.sidecars": [{"name": "s", "image": "i"}],
            "spec.podTemplate.initContainers": [{"name": "s", "image": "i"}],
        },
        "spec.podTemplate.sidecars",
        "'s' is taken by an init container",
    ),
    (
        "launch-ranks",
        {"spec.command": ["zerotrain", "launch"], "spec.args": ["--ranks", "4", "train.py"]},
        "spec.command",
        "in a job, spec.ranksPerWorker or resources.gpus.count says it",
    ),
    (
        "launch-nothing",
        {"spec.command": ["zerotrain", "launch"]},
        "spec.command",
        "is given no script",
    ),
]

NOT_SUPPORTED = {"spec.config": {"train_micro_batch_size_per_gpu": 1, "hybrid_engine": {"enabled": True}}}

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"spec.config": ABSENT, "spec.configFrom": {"configMapKeyRef": {"name": "ds", "key": "c.json"}}},
    {"spec.nvme": {"size": "1Ti", "encryption": "None", "requireEncryptedVolume": False}},
    {"spec.nvme": {"size": "1Ti", "encryption": "AEAD"}},
    {"spec.nvme": {"size": "1Ti", "storageClassName": "fast", "requireEncryptedVolume": True}},
    {"spec.resources": {"rdma": {"resourceName": "rdma/hca", "count": 1}}},
    {"spec.config": OFFLOAD, "spec.nvme": {"size": "1Ti", "mountPath": "/mnt/a", "encryption": "AEAD"}},
    {"spec.config": spilled(encryption="None"), "spec.nvme": {"size": "1Ti", "encryption": "None"}},
    {"spec.config": spilled(paths=["/local_nvme"], max_bytes=2**39), "spec.nvme": {"size": "1Ti"}},
    {"spec.hangPolicy": {"minTimeoutSeconds": 60, "action": "Report", "stragglerPercent": 200}},
    {"spec.scheduling": {"gang": "None", "priorityClassName": "high"}},
    {"spec.elastic": {"minWorkers": 1, "maxWorkers": 4}},
    {"spec.config.zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
    {"spec.config.zero_optimization": {"stage": 2, "zero_hpz_partition_size": 3}},
    {"spec.resources": {"memory": "8Gi", "pinnedMemory": "4Gi", "sharedMemory": "2Gi"}},
    {"spec.model": {"factory": {"function": "pkg.mod:build", "args": {"depth": 3}}}},
    {"spec.model": {"path": "/models/llama"}},
    {**MOUNTED, "spec.podTemplate.volumeMounts": [{"name": "data", "mountPath": "/tmp/data"}]},
]


@pytest.mark.parametrize(("changes", "path", "text"), [c[1:] for c in INVALID], ids=[c[0] for c in INVALID])
def test_wrong_values(changes: dict[str, Any], path: str, text: str) -> None:
    found = refusals(make_job(changes).spec)
    matching = [item for item in found if item.path == path and item.reason is Reason.INVALID_SPEC]
    assert matching, found
    assert text in matching[0].message


def test_missing_behaviour() -> None:
    found = refusals(make_job(NOT_SUPPORTED).spec)
    assert [(item.path, item.reason) for item in found] == [
        ("spec.config.hybrid_engine", Reason.NOT_SUPPORTED)
    ]
    assert "Remove" in found[0].message


@pytest.mark.parametrize("changes", ACCEPTED)
def test_good_jobs(changes: dict[str, Any]) -> None:
    assert refusals(make_job(changes).spec) == ()


def test_wrong_values_come_before_missing_behaviour() -> None:
    found = refusals(make_job({**NOT_SUPPORTED, "spec.nvme": {"size": "1Ti", "mountPath": "/tmp"}}).spec)
    assert [item.reason for item in found] == [Reason.INVALID_SPEC, Reason.NOT_SUPPORTED]


def test_what_the_engine_does_not_run_is_not_supported() -> None:
    config = {"zero_optimization": {"stage": 2, "mics_shard_size": 2}}
    found = refusals(make_job({"spec.config": config}).spec)
    assert {item.reason for item in found} == {Reason.NOT_SUPPORTED}
    assert found[0].path.startswith("spec.config.zero_optimization.mics_shard_size")
