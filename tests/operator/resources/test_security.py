"""A real API server with Pod Security "restricted" accepts every object that the operator builds."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.devcluster import Cluster
from tests.support.jobs import ABSENT, make_job
from zerotrain.operator.resources import ResourceOptions, build, worker_pod

pytestmark = pytest.mark.cluster

Json = dict[str, Any]
KEY = b"k" * 32

RDMA: Json = {"spec.resources": {"rdma": {"resourceName": "rdma/hca", "count": 2}}}

JOBS: dict[str, Json] = {
    "plain": {},
    "one-worker": {"spec.workers": 1},
    "by-reference": {
        "spec.config": ABSENT,
        "spec.configFrom": {"configMapKeyRef": {"name": "ds", "key": "c.json"}},
    },
    "gpus-and-memory": {
        "spec.resources": {
            "gpus": {"count": 8},
            "cpu": "32",
            "memory": "512Gi",
            "pinnedMemory": "256Gi",
            "sharedMemory": "16Gi",
        },
        "spec.nvme": {"size": "2Ti", "storageClassName": "fast"},
    },
    "local-nvme": {"spec.nvme": {"size": "2Ti"}, "spec.checkpoint": ABSENT},
    "ephemeral": {
        "spec.workers": 1,
        "spec.checkpoint.volume": {
            "ephemeral": {
                "volumeClaimTemplate": {
                    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
                }
            }
        },
    },
    "template": {
        "spec.podTemplate": {
            "labels": {"team": "a"},
            "env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "envFrom": [{"prefix": "X_", "configMapRef": {"name": "s", "optional": True}}],
            "volumes": [
                {"name": "data", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
                {"name": "all", "projected": {"sources": [{"secret": {"name": "s"}}]}},
                {
                    "name": "info",
                    "downwardAPI": {"items": [{"path": "n", "fieldRef": {"fieldPath": "metadata.name"}}]},
                },
                {"name": "inline", "csi": {"driver": "csi.example.com", "volumeAttributes": {"a": "b"}}},
            ],
            "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
            "initContainers": [
                {"name": "fetch", "image": "f", "volumeMounts": [{"name": "data", "mountPath": "/d"}]}
            ],
            "sidecars": [
                {
                    "name": "log",
                    "image": "l",
                    "ports": [{"containerPort": 80, "name": "web"}],
                    "resources": {"limits": {"cpu": "100m"}},
                    "securityContext": {"runAsUser": 1000, "readOnlyRootFilesystem": False},
                }
            ],
            "affinity": {
                "podAntiAffinity": {
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "weight": 1,
                            "podAffinityTerm": {
                                "topologyKey": "kubernetes.io/hostname",
                                "labelSelector": {"matchExpressions": [{"key": "a", "operator": "Exists"}]},
                            },
                        }
                    ]
                }
            },
            "imagePullSecrets": [{"name": "reg"}],
        },
        "spec.scheduling": {
            "nodeSelector": {"disk": "nvme"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        },
    },
}


@pytest.fixture(scope="module")
def restricted(control_plane: Cluster) -> Iterator[str]:
    with control_plane.namespace() as name:
        levels = [f"pod-security.kubernetes.io/{mode}=restricted" for mode in ("enforce", "warn", "audit")]
        control_plane.kubectl("label", "namespace", name, *levels)
        yield name


def test_nfs_is_the_one_volume_that_needs_a_weaker_namespace(
    control_plane: Cluster, namespace: str, restricted: str
) -> None:
    volume = {"spec.checkpoint.volume": {"nfs": {"server": "s", "path": "/p"}}}
    control_plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=baseline")
    strict, baseline = (
        _dry_run(
            control_plane,
            build(make_job({**volume, "metadata.namespace": name}), 1, KEY, ResourceOptions()),
        )
        for name in (restricted, namespace)
    )
    assert 'restricted volume type "nfs"' in strict[1]
    assert baseline == (0, "")


@pytest.mark.parametrize("level", ["restricted", "baseline", "privileged"])
def test_rdma_needs_the_level_privileged(control_plane: Cluster, level: str) -> None:
    """The pods alone need it: all other objects of the job stay restricted."""
    with control_plane.namespace() as name:
        control_plane.kubectl("label", "namespace", name, f"pod-security.kubernetes.io/enforce={level}")
        job = make_job({**RDMA, "metadata.namespace": name})
        code, said = _dry_run(control_plane, build(job, 1, KEY, ResourceOptions()))
    if level == "privileged":
        assert (code, said) == (0, "")
        return
    assert f'violates PodSecurity "{level}:latest"' in said
    assert said.count("unrestricted capabilities") + said.count("non-default capabilities") == 2
    assert "IPC_LOCK" in said
    assert "volume" not in said, "nothing but the capability may be refused"


def _dry_run(cluster: Cluster, objects: list[Json]) -> tuple[int, str]:
    text = "".join(f"---\n{json.dumps(item)}\n" for item in objects)
    done = cluster.kubectl("create", "--dry-run=server", "-f", "-", input=text, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("changes", JOBS.values(), ids=JOBS.keys())
def test_the_api_server_takes_them_without_a_warning(
    control_plane: Cluster, restricted: str, changes: Json
) -> None:
    job = make_job({**changes, "metadata.namespace": restricted})
    assert _dry_run(control_plane, build(job, 1, KEY, ResourceOptions())) == (0, "")


@pytest.mark.parametrize(
    "field", ["seccompProfile", "runAsNonRoot", "allowPrivilegeEscalation", "capabilities"]
)
def test_the_namespace_would_refuse_a_weaker_pod(control_plane: Cluster, restricted: str, field: str) -> None:
    pod = copy.deepcopy(worker_pod(make_job({"metadata.namespace": restricted}), 1, 0, ResourceOptions()))
    for context in (pod["spec"]["securityContext"], pod["spec"]["containers"][0]["securityContext"]):
        context.pop(field, None)
    code, message = _dry_run(control_plane, [pod])
    assert code != 0
    assert "violates PodSecurity" in message
