"""Dirty text in every field of text, paths with `..`, and settings by environment variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.cluster.hostile.bodies import Post, config, core, job
from tests.cluster.hostile.cases import Bystander, add_jobs, case
from tests.cluster.hostile.texts import BREAKLESS, DIRT
from tests.support.jobs import ABSENT
from tests.support.kube_json import KubeJson
from zerotrain.contract.worker_environment import LaunchSpec

Json = dict[str, Any]
ENCRYPTED: Json = {
    "spec.nvme": {"size": "1Gi", "storageClassName": "encrypted", "requireEncryptedVolume": True}
}
NVME: Json = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
EMPTY_DIR = [{"name": "v", "emptyDir": {}}]


def spill(*paths: str) -> Json:
    """Return a job whose class must be encrypted, and whose configuration spills to these paths."""
    zero = {**NVME["zero_optimization"], "spill": {"paths": list(paths)}}
    return {**config(zero_optimization=zero), **ENCRYPTED}


def nvme_at(path: str) -> Json:
    return {"spec.nvme": {"size": "1Gi", "mountPath": path}}


def mounted(path: str, **more: Any) -> Json:
    mount = {"name": "v", "mountPath": path, **more}
    return {"spec.podTemplate": {"volumes": EMPTY_DIR, "volumeMounts": [mount]}}


add_jobs(
    [
        ("text-key", config(**{f"zero_{DIRT}optim": 1}), {}),
        ("text-deep-key", config(zero_optimization={f"stage{DIRT}": 3}), {}),
        ("text-value", config(zero_optimization={"stage": DIRT}), {}),
        ("text-optimizer", config(optimizer={"type": DIRT, "params": {}}), {}),
        ("text-half-pair", config(**{"x\ud800": "\udfff"}), {}),
        ("text-comment", config(_comment=DIRT), {}),
        ("text-image", {"spec.image": BREAKLESS}, {}),
        ("text-command", {"spec.command": [DIRT], "spec.args": [DIRT]}, {}),
        ("text-data", {"spec.data.path": "/" + DIRT}, {}),
        ("text-model-path", {"spec.model": {"path": "/" + DIRT}}, {}),
        ("text-managed-by", {"spec.managedBy": f"{BREAKLESS}/{BREAKLESS}"}, {}),
        ("text-nvme-path", {"spec.nvme": {"size": "1Gi", "mountPath": "/" + DIRT}}, {}),
        ("text-nfs", {"spec.checkpoint": {"volume": {"nfs": {"server": DIRT, "path": "/" + DIRT}}}}, {}),
        ("text-mount-path", mounted("/" + DIRT.replace(":", "")), {}),
        ("text-sub-path", mounted("/v", subPath=DIRT), {}),
        ("text-sub-path-expr", mounted("/v", subPathExpr=f"$({DIRT})"), {}),
        ("text-env", {"spec.podTemplate.env": [{"name": "X", "value": DIRT}]}, {}),
        ("text-env-name", {"spec.podTemplate.env": [{"name": DIRT, "value": "x"}]}, {}),
        ("text-label-key", {"spec.podTemplate.labels": {DIRT: "x"}}, {}),
        ("text-annotation", {"spec.podTemplate.annotations": {"x": DIRT, DIRT: DIRT}}, {}),
        ("text-node-selector", {"spec.scheduling.nodeSelector": {DIRT: "x"}}, {}),
        ("text-pattern", {"spec.failurePolicy.rules": [
            {"action": "FailJob", "onMessagePatterns": [DIRT[:100], "(a*)*b", "((a{1,30}){1,30})"]}]}, {}),
        ("class-unknown", {"spec.scheduling.priorityClassName": "nobody"}, {}),
        ("queue-unknown", {"spec.scheduling.queueName": "nobody"}, {}),
        ("scheduler-unknown", {"spec.scheduling.schedulerName": "nobody"}, {}),
        ("secret-missing", {"spec.podTemplate.imagePullSecrets": [{"name": "nobody"}]}, {}),
        ("deleted-at-once", {
            "spec.runPolicy": {"ttlSecondsAfterFinished": 0, "activeDeadlineSeconds": 1}}, {}),
        ("climb-data", {"spec.data.path": "/data/../../etc/zerotrain/job"}, {}),
    ],
    alone=False,
)  # fmt: skip
add_jobs(
    [
        ("climb-spill", spill("/local_nvme/../tmp/x"), {}),
        ("climb-spill-second", spill("/local_nvme/a", "/local_nvme/./../tmp"), {}),
        ("climb-spill-inside", spill("/local_nvme/a/../../tmp"), {}),
        ("climb-nvme-job", nvme_at("/local_nvme/../etc/zerotrain/job"), {}),
        ("climb-nvme-shm", nvme_at("/dev/shm/../shm"), {}),
        ("climb-nvme-proc", nvme_at("/proc/../proc"), {}),
        ("climb-mount", mounted("/etc/zerotrain/x/../job"), {}),
        ("climb-mount-double", mounted("/etc//zerotrain/job"), {}),
        ("climb-mount-dot", mounted("/etc/./zerotrain/job"), {}),
        ("climb-mount-root", mounted("/v/.."), {}),
        ("climb-sub-path", mounted("/v", subPath="a/../../x"), {}),
        ("switch-by-env", {
            "spec.podTemplate.env": [{"name": "ZEROTRAIN_NVME_ENCRYPTION", "value": "None"}]}, {}),
    ],
    never_starts=True,
    alone=False,
)  # fmt: skip

SWITCHES = {
    "ZEROTRAIN_NVME_ENCRYPTION": "None",
    "ZEROTRAIN_HTTP_HOST": "127.0.0.1",
    "ZEROTRAIN_HANG_BACKSTOP_SECONDS": "1",
    "ZEROTRAIN_NVME_PATH": "/tmp",
    "ZEROTRAIN_CHECKPOINT_DIR": "/tmp",
    "ZEROTRAIN_TERMINATION_LOG": "/tmp/x",
    "MASTER_ADDR": "203.0.113.1",
    "RANK": "7",
}
"""Settings that a ConfigMap tries to make for jobs that leave them open."""


def switched(name: str, source: Json) -> Post:
    template = {"envFrom": [source]}
    spec = {**config(**NVME), "spec.nvme": {"size": "1Gi"}, "spec.podTemplate": template}
    return job(name, spec)


def unswitched(name: str) -> Callable[[KubeJson, str], list[str]]:
    """Return a check that the pod's settings are the operator's, read as kubelet and launcher read them."""

    def check(api: KubeJson, namespace: str) -> list[str]:
        pods = api.get(f"/api/v1/namespaces/{namespace}/pods?labelSelector=zerotrain.dev/job={name}")["items"]
        if not pods:
            return [f"{name} has no pod"]
        worker = next(part for part in pods[0]["spec"]["containers"] if part["name"] == "worker")
        given = {entry["name"]: entry.get("value", "") for entry in worker["env"]}
        own, switched = LaunchSpec.from_env(given), LaunchSpec.from_env({**SWITCHES, **given})
        found = [] if own == switched else [f"{name} decides {switched}, the operator {own}"]
        if switched.nvme_encryption not in (None, "AEAD"):
            found.append(f"{name}: the spill's encryption is {switched.nvme_encryption}")
        return found

    return check


@case("switch-by-map", check=unswitched("switch-by-map"))
def _switch_by_map(bystander: Bystander) -> list[Post]:
    source = {"configMapRef": {"name": "switch-by-map"}}
    return [core("ConfigMap", "switch-by-map", data=SWITCHES), switched("switch-by-map", source)]


@case("switch-by-secret", check=unswitched("switch-by-secret"))
def _switch_by_secret(bystander: Bystander) -> list[Post]:
    source = {"secretRef": {"name": "switch-by-secret"}}
    return [core("Secret", "switch-by-secret", stringData=SWITCHES), switched("switch-by-secret", source)]


@case("text-meta")
def _text_meta(bystander: Bystander) -> list[Post]:
    return [job("text-meta", annotations={"zerotrain.dev/ignore-memory-plan": DIRT, "x": DIRT})]


@case("config-key-dirty")
def _config_key_dirty(bystander: Bystander) -> list[Post]:
    source = {"configMapKeyRef": {"name": "config-key-dirty", "key": "c.json"}}
    text = '{"zero_optimization": {"stage": "\x1b[31m"}, "' + BREAKLESS + '": 1}'
    return [
        core("ConfigMap", "config-key-dirty", data={"c.json": text}),
        job("config-key-dirty", {"spec.config": ABSENT, "spec.configFrom": source}),
    ]
