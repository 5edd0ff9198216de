"""Jobs that the API server must reject or accept: the tables of tests/operator/api/test_crd_rejections.py."""

from __future__ import annotations

from typing import Any

from tests.support.crd_spreads import ACCEPTED_SPREADS, REFUSED_SPREADS
from tests.support.jobs import ABSENT

VOLUME = {"name": "data", "emptyDir": {}}
APPARMOR = "container.apparmor.security.beta.kubernetes.io"

FINETUNE = {
    "model": "/models/a",
    "method": "full",
    "data": "/data/rows.jsonl",
    "learningRate": 1e-4,
    "batchSize": 2,
    "maxLength": 128,
}
FINETUNES: dict[str, Any] = {"spec.model": ABSENT, "spec.data": ABSENT, "spec.finetune": FINETUNE}
"""Change of the good job to a fine-tuning."""

# Name of the job, change to the good job, path that the API server must name, part of its message.
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("workers-0", {"spec.workers": 0}, "spec.workers", "greater than or equal to 1"),
    ("workers-many", {"spec.workers": 10_001}, "spec.workers", "less than or equal to 10000"),
    ("workers-text", {"spec.workers": "two"}, "spec.workers", "must be of type integer"),
    ("workers-half", {"spec.workers": 1.5}, "spec.workers", "must be of type integer"),
    ("ranks-0", {"spec.ranksPerWorker": 0}, "spec.ranksPerWorker", "greater than or equal to 1"),
    (
        "ranks-gpus",
        {"spec.resources.gpus.count": 1},
        "spec.ranksPerWorker",
        "must not exceed resources.gpus.count",
    ),
    ("image-none", {"spec.image": ABSENT}, "spec.image", "Required value"),
    ("image-space", {"spec.image": "a b"}, "spec.image", "should match"),
    ("config-none", {"spec.config": ABSENT}, "spec.config", "exactly one of config, configFrom"),
    (
        "config-both",
        {"spec.configFrom": {"configMapKeyRef": {"name": "ds", "key": "c.json"}}},
        "spec.config",
        "exactly one of config, configFrom",
    ),
    ("config-text", {"spec.config": "{}"}, "spec.config", "must be of type object"),
    (
        "config-key",
        {"spec.config": ABSENT, "spec.configFrom": {"configMapKeyRef": {"name": "ds"}}},
        "spec.configFrom.configMapKeyRef.key",
        "Required value",
    ),
    ("model-none", {"spec.model": ABSENT}, "spec.model", "model must be given"),
    ("model-empty", {"spec.model": {}}, "spec.model", "exactly one of gpt, preset, path, factory"),
    ("model-two", {"spec.model.preset": "gpt-5m"}, "spec.model", "exactly one of gpt, preset, path, factory"),
    ("model-heads", {"spec.model.gpt.heads": 3}, "spec.model.gpt.dModel", "multiple of heads"),
    ("model-context", {"spec.model.gpt.context": ABSENT}, "spec.model.gpt.context", "Required value"),
    (
        "model-factory",
        {"spec.model": {"factory": {"function": "pkg.mod.build"}}},
        "spec.model.factory.function",
        "should match",
    ),
    ("data-none", {"spec.data": ABSENT}, "spec.data", "data must be given"),
    ("data-relative", {"spec.data.path": "corpus"}, "spec.data.path", "should match"),
    ("steps-none", {"spec.steps": ABSENT}, "spec.steps", "steps must be given"),
    ("steps-0", {"spec.steps": 0}, "spec.steps", "greater than or equal to 1"),
    ("args-alone", {"spec.args": ["--fast"]}, "spec.args", "args needs command"),
    ("finetune-two", {"spec.finetune": FINETUNE}, "spec.finetune", "a job has one program"),
    (
        "finetune-steps",
        {**FINETUNES, "spec.steps": ABSENT},
        "spec.finetune",
        "finetune needs its epochs or steps",
    ),
    (
        "finetune-volume",
        {**FINETUNES, "spec.checkpoint": ABSENT},
        "spec.finetune",
        "its output folder is on that volume",
    ),
    (
        "finetune-qlora",
        {**FINETUNES, "spec.finetune.method": "qlora"},
        "spec.finetune.method",
        "quantised base weights cannot be sharded",
    ),
    (
        "finetune-lora",
        {**FINETUNES, "spec.finetune.lora": {"rank": 4}},
        "spec.finetune.lora",
        "lora needs method lora",
    ),
    (
        "finetune-early",
        {**FINETUNES, "spec.finetune.earlyStopping": {"patience": 2}},
        "spec.finetune.earlyStopping",
        "earlyStopping needs eval",
    ),
    (
        "finetune-rate",
        {**FINETUNES, "spec.finetune.learningRate": 0},
        "spec.finetune.learningRate",
        "must be above 0",
    ),
    ("finetune-source", {**FINETUNES, "spec.finetune.data": "../rows"}, "spec.finetune.data", "should match"),
    ("cpu-unit", {"spec.resources.cpu": "4Gi"}, "spec.resources.cpu", "should match"),
    ("memory-unit", {"spec.resources.memory": "512GB"}, "spec.resources.memory", "should match"),
    ("memory-0", {"spec.resources.memory": 0}, "spec.resources.memory", "greater than or equal to 1"),
    (
        "pinned-alone",
        {"spec.resources.pinnedMemory": "1Gi"},
        "spec.resources.memory",
        "memory must be given when pinnedMemory is",
    ),
    ("gpus-0", {"spec.resources.gpus.count": 0}, "spec.resources.gpus.count", "greater than or equal to 1"),
    (
        "gpus-name",
        {"spec.resources.gpus": {"count": 2, "resourceName": "gpu"}},
        "spec.resources.gpus.resourceName",
        "should match",
    ),
    (
        "rdma-gpus",
        {
            "spec.resources.gpus": {"count": 1},
            "spec.resources.rdma": {"resourceName": "nvidia.com/gpu"},
        },
        "spec.resources.rdma",
        "different resources",
    ),
    (
        "nvme-no-class",
        {"spec.nvme": {"size": "1Ti", "requireEncryptedVolume": True}},
        "spec.nvme.storageClassName",
        "requireEncryptedVolume needs storageClassName",
    ),
    ("nvme-size", {"spec.nvme": {"mountPath": "/nvme"}}, "spec.nvme.size", "Required value"),
    ("nvme-path", {"spec.nvme": {"size": "1Ti", "mountPath": "nvme"}}, "spec.nvme.mountPath", "should match"),
    (
        "nvme-cipher",
        {"spec.nvme": {"size": "1Ti", "encryption": "LUKS"}},
        "spec.nvme.encryption",
        'supported values: "AEAD", "None"',
    ),
    ("ckpt-none", {"spec.checkpoint": {}}, "spec.checkpoint.volume", "Required value"),
    (
        "ckpt-two",
        {"spec.checkpoint.volume.nfs": {"server": "s", "path": "/p"}},
        "spec.checkpoint.volume",
        "exactly one of persistentVolumeClaim",
    ),
    (
        "ckpt-unshared",
        {"spec.checkpoint.volume": {"emptyDir": {}}},
        "spec.checkpoint.volume",
        "several workers need one checkpoint volume",
    ),
    (
        "verify-unshared",
        {
            "spec.workers": 1,
            "spec.checkpoint.volume": {"emptyDir": {}},
            "spec.checkpoint.verify": "OnCompletion",
        },
        "spec.checkpoint.verify",
        "a volume that another pod can mount",
    ),
    (
        "ckpt-readonly",
        {"spec.checkpoint.volume.persistentVolumeClaim.readOnly": True},
        "spec.checkpoint.volume.persistentVolumeClaim.readOnly",
        "must be writable",
    ),
    ("ckpt-keep", {"spec.checkpoint.keepLast": 0}, "spec.checkpoint.keepLast", "greater than or equal to 1"),
    (
        "elastic-order",
        {"spec.elastic": {"minWorkers": 4, "maxWorkers": 2}},
        "spec.elastic.minWorkers",
        "must not exceed maxWorkers",
    ),
    (
        "elastic-range",
        {"spec.elastic": {"minWorkers": 3, "maxWorkers": 4}},
        "spec.workers",
        "between elastic.minWorkers and elastic.maxWorkers",
    ),
    (
        "elastic-config",
        {
            "spec.elastic": {"minWorkers": 1, "maxWorkers": 4},
            "spec.config": ABSENT,
            "spec.configFrom": {"configMapKeyRef": {"name": "d", "key": "k"}},
        },
        "spec.elastic",
        "elastic needs config inline",
    ),
    (
        "elastic-checkpoint",
        {"spec.elastic": {"minWorkers": 1, "maxWorkers": 4}, "spec.checkpoint.onTermination": False},
        "spec.elastic",
        "a resize goes on from a checkpoint",
    ),
    (
        "elastic-volume",
        {
            "spec.elastic": {"minWorkers": 1, "maxWorkers": 4},
            "spec.workers": 1,
            "spec.checkpoint.volume": {"emptyDir": {}},
        },
        "spec.elastic",
        "on a volume that all workers see",
    ),
    (
        "rule-empty",
        {"spec.failurePolicy.rules": [{"action": "FailJob"}]},
        "spec.failurePolicy.rules[0]",
        "at least one of onExitCodes, onReasons",
    ),
    (
        "rule-action",
        {"spec.failurePolicy.rules": [{"onExitCodes": [1], "action": "Retry"}]},
        "spec.failurePolicy.rules[0].action",
        "Unsupported value",
    ),
    (
        "rule-rank",
        {"spec.failurePolicy.rules": [{"onRanks": [-1], "action": "FailJob"}]},
        "spec.failurePolicy.rules[0].onRanks[0]",
        "greater than or equal to 0",
    ),
    (
        "rule-shrink",
        {"spec.failurePolicy.rules": [{"onExitCodes": [1], "action": "ShrinkAndRestart"}]},
        "spec.failurePolicy",
        "ShrinkAndRestart needs elastic",
    ),
    (
        "not-ready",
        {"spec.failurePolicy.nodeNotReadySeconds": 5},
        "spec.failurePolicy.nodeNotReadySeconds",
        "greater than or equal to 10",
    ),
    (
        "restarts",
        {"spec.failurePolicy.maxRestarts": -1},
        "spec.failurePolicy.maxRestarts",
        "greater than or equal to 0",
    ),
    (
        "clean",
        {"spec.runPolicy.cleanPodPolicy": "Never"},
        "spec.runPolicy.cleanPodPolicy",
        "Unsupported value",
    ),
    ("gang", {"spec.scheduling.gang": "auto"}, "spec.scheduling.gang", "Unsupported value"),
    ("suspend-text", {"spec.suspend": "yes"}, "spec.suspend", "must be of type boolean"),
    ("managed", {"spec.managedBy": "someone"}, "spec.managedBy", "should match"),
    (
        "label-ours",
        {"spec.podTemplate.labels": {"zerotrain.dev/job": "x"}},
        "spec.podTemplate.labels",
        "are reserved",
    ),
    (
        "apparmor-off",
        {"spec.podTemplate.annotations": {f"{APPARMOR}/worker": "unconfined"}},
        "spec.podTemplate.annotations",
        "must be runtime/default or localhost/",
    ),
    (
        "apparmor-off-for-a-sidecar",
        {"spec.podTemplate.annotations": {f"{APPARMOR}/log": "runtime/default ", "note": "x"}},
        "spec.podTemplate.annotations",
        "must be runtime/default or localhost/",
    ),
    (
        "env-ours",
        {"spec.podTemplate.env": [{"name": "MASTER_ADDR", "value": "x"}]},
        "spec.podTemplate.env",
        "the operator sets these variables itself",
    ),
    (
        "env-twice",
        {"spec.podTemplate.env": [{"name": "A"}, {"name": "A"}]},
        "spec.podTemplate.env[1]",
        "Duplicate value",
    ),
    *REFUSED_SPREADS,
    (
        "volume-ours",
        {"spec.podTemplate.volumes": [{"name": "zerotrain-shm", "emptyDir": {}}]},
        "spec.podTemplate.volumes[0].name",
        "are reserved",
    ),
    (
        "volume-empty",
        {"spec.podTemplate.volumes": [{"name": "data"}]},
        "spec.podTemplate.volumes[0]",
        "exactly one of configMap, secret",
    ),
    (
        "sidecar-ours",
        {"spec.podTemplate.sidecars": [{"name": "worker", "image": "x"}]},
        "spec.podTemplate.sidecars[0].name",
        "are reserved",
    ),
    (
        "user-root",
        {"spec.podTemplate.sidecars": [{"name": "s", "image": "x", "securityContext": {"runAsUser": 0}}]},
        "spec.podTemplate.sidecars[0].securityContext.runAsUser",
        "greater than or equal to 1",
    ),
    ("n" * 64, {}, "metadata.name", "at most 51 characters"),
    ("n" * 52, {}, "metadata.name", "at most 51 characters"),
    ("1st", {}, "metadata.name", "start with a letter"),
    ("a.b", {}, "metadata.name", "must consist of"),
]

# A key that the schema does not know: kubectl's message names the key's path, not the object.
UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"spec.worker": 2}, "spec.worker"),
    ({"spec.ranks_per_worker": 2}, "spec.ranks_per_worker"),
    ({"spec.nvme": {"size": "1Ti", "storageclass": "x"}}, "spec.nvme.storageclass"),
    (
        {"spec.podTemplate.volumes": [{"name": "d", "hostPath": {"path": "/"}}]},
        "spec.podTemplate.volumes[0].hostPath",
    ),
    (
        {
            "spec.podTemplate.volumes": [
                {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
            ]
        },
        "spec.podTemplate.volumes[0].projected.sources[0].serviceAccountToken",
    ),
    ({"spec.podTemplate.hostNetwork": True}, "spec.podTemplate.hostNetwork"),
    (
        {"spec.podTemplate.volumes": [{"name": "d", "emptyDir": {"size": "1Gi"}}]},
        "spec.podTemplate.volumes[0].emptyDir.size",
    ),
]

# Changes to a stored job that runs: name in the message, change, path, part of the message.
IMMUTABLE: list[tuple[dict[str, Any], str, str]] = [
    ({"spec.workers": 3}, "spec.workers", "immutable unless elastic"),
    ({"spec.ranksPerWorker": 1}, "spec.ranksPerWorker", "immutable"),
    ({"spec.ranksPerWorker": ABSENT}, "spec.ranksPerWorker", "immutable"),
    ({"spec.model.gpt.layers": 3}, "spec.model", "immutable"),
    ({"spec.resources": {"memory": "8Gi"}}, "spec.resources", "immutable"),
    ({"spec.nvme": {"size": "1Gi"}}, "spec.nvme", "immutable"),
    ({"spec.seed": 1}, "spec.seed", "immutable"),
    ({"spec.managedBy": "kueue.x-k8s.io/multikueue"}, "spec.managedBy", "immutable"),
    ({"spec.checkpoint.volume.persistentVolumeClaim.claimName": "b"}, "spec.checkpoint", "immutable"),
    ({"spec.checkpoint": ABSENT}, "spec.checkpoint", "immutable"),
    ({"spec.image": "other:1"}, "spec.image", "only while the job is suspended"),
    ({"spec.steps": 101}, "spec.steps", "only while the job is suspended"),
    ({"spec.steps": 9, "spec.image": "a:1"}, "spec.image", "suspended. spec.steps: steps can be changed"),
    ({"spec.command": ["python", "x.py"]}, "spec.command", "only while the job is suspended"),
    ({"spec.data.path": "/data"}, "spec.data", "only while the job is suspended"),
    ({"spec.config.zero_optimization.stage": 2}, "spec.config", "only while the job is suspended"),
    ({"spec.checkpoint.everySteps": 10}, "spec.checkpoint", "only while the job is suspended"),
    ({"spec.checkpoint.keepLast": 1}, "spec.checkpoint", "checkpoint.keepLast can be changed only while"),
    ({"spec.checkpoint.resumeFrom": "None"}, "spec.checkpoint", "checkpoint.resumeFrom can be changed only"),
    (
        {"spec.scheduling.nodeSelector": {"a": "b"}},
        "spec.scheduling",
        "scheduling.nodeSelector can be changed",
    ),
    (
        {"spec.scheduling": {"priorityClassName": "high", "queueName": "q"}},
        "spec.scheduling",
        "scheduling.queueName can be changed only while the job is suspended",
    ),
    ({"spec.podTemplate.labels": {"a": "b"}}, "spec.podTemplate", "only while the job is suspended"),
    ({"spec.elastic": {"minWorkers": 1, "maxWorkers": 4}}, "spec.elastic", "given or removed only while"),
]

EDITABLE: list[dict[str, Any]] = [
    {"spec.scheduling": {"priorityClassName": "high"}},
    {"spec.scheduling": {"priorityClassName": "low"}},
    {"spec.scheduling": {}},
    {"spec.runPolicy": {"ttlSecondsAfterFinished": 0, "cleanPodPolicy": "All"}},
    {"spec.runPolicy": {"activeDeadlineSeconds": 60, "terminationTimeoutSeconds": 5}},
    {"spec.runPolicy": {"startDeadlineSeconds": 900}},
    {"spec.hangPolicy": {"minTimeoutSeconds": 600}},
    {"spec.failurePolicy": {"maxRestarts": 9, "rules": [{"onExitCodes": [1], "action": "FailJob"}]}},
    {"spec.checkpoint.verify": "OnCompletion", "spec.checkpoint.verifyTimeoutSeconds": 60},
    {"spec.checkpoint.verify": "Never"},
    {},
]
"""Changes of a running job, one after the other, that the API server must accept."""

ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("one", {"spec.workers": 1, "spec.checkpoint.volume": {"emptyDir": {"sizeLimit": "1Gi"}}}),
    ("n" * 51, {}),
    ("finetune", FINETUNES),
    (
        "by-reference",
        {"spec.config": ABSENT, "spec.configFrom": {"configMapKeyRef": {"name": "d", "key": "k"}}},
    ),
    (
        "own-program",
        {
            "spec.command": ["python", "train.py"],
            "spec.args": ["--fast"],
            **{f"spec.{field}": ABSENT for field in ("model", "data", "steps")},
        },
    ),
    (
        "factory",
        {"spec.model": {"factory": {"function": "pkg.mod:build", "args": {"deep": [1, {"er": None}]}}}},
    ),
    ("elastic", {"spec.elastic": {"minWorkers": 1, "maxWorkers": 4}}),
    (
        "everything",
        {
            "spec.resources": {
                "gpus": {"count": 8},
                "cpu": "500m",
                "memory": "512Gi",
                "pinnedMemory": "256Gi",
                "sharedMemory": "16Gi",
                "rdma": {"resourceName": "rdma/hca", "count": 1},
            },
            "spec.nvme": {"size": "2Ti", "storageClassName": "local-nvme", "encryption": "AEAD"},
            "spec.failurePolicy": {
                "maxRestarts": 5,
                "windowSeconds": 3600,
                "rules": [
                    {"onExitCodes": [64, 65], "action": "FailJob"},
                    {"onReasons": ["NodeLost", "Preempted"], "action": "RestartAllIgnoreBudget"},
                    {"onRanks": [0, 7], "onMessagePatterns": [r"Xid \d+"], "action": "ReplaceNodeAndRestart"},
                ],
            },
            "spec.hangPolicy": {
                "stepTimeoutFactor": 10,
                "minTimeoutSeconds": 300,
                "startupTimeoutSeconds": 1800,
                "firstStepTimeoutSeconds": 3600,
                "checkpointTimeoutSeconds": 1800,
                "action": "Restart",
                "stragglerPercent": 150,
            },
            "spec.runPolicy": {
                "activeDeadlineSeconds": 86400,
                "startDeadlineSeconds": 1800,
                "ttlSecondsAfterFinished": 3600,
                "cleanPodPolicy": "Running",
                "terminationTimeoutSeconds": 120,
            },
            "spec.scheduling": {
                "gang": "Auto",
                "queueName": "team-a",
                "priorityClassName": "high",
                "nodeSelector": {"disk": "nvme"},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
                "topologyKey": "topology.kubernetes.io/zone",
            },
        },
    ),
    (
        "template",
        {
            "spec.podTemplate": {
                "labels": {"team": "a"},
                "annotations": {"note": "x", f"{APPARMOR}/worker": "localhost/training"},
                "env": [
                    {"name": "A", "value": "1"},
                    {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                ],
                "envFrom": [{"secretRef": {"name": "s", "optional": True}}],
                "volumes": [VOLUME, {"name": "nfs", "nfs": {"server": "s", "path": "/p"}}],
                "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
                "initContainers": [
                    {"name": "fetch", "image": "x", "volumeMounts": [{"name": "data", "mountPath": "/d"}]}
                ],
                "sidecars": [{"name": "log", "image": "x", "resources": {"limits": {"cpu": "100m"}}}],
                "affinity": {
                    "podAntiAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": [
                            {
                                "topologyKey": "kubernetes.io/hostname",
                                "labelSelector": {"matchLabels": {"a": "b"}},
                            }
                        ]
                    }
                },
                "topologySpreadConstraints": ACCEPTED_SPREADS,
                "imagePullSecrets": [{"name": "reg"}],
                "runtimeClassName": "nvidia",
                "serviceAccountName": "runner",
            }
        },
    ),
]
