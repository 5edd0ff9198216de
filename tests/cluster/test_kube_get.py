"""`Cluster.get` returns what `kubectl get` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.devcluster import Cluster, checked, open_kubeconfig
from tests.support.kube_json import RequestRefused

pytestmark = pytest.mark.cluster


def kubectl(cluster: Cluster, args: Sequence[str]) -> Any:
    return json.loads(cluster.kubectl("get", *args, "-o", "json", "--show-managed-fields").stdout)


@pytest.fixture
def filled(control_plane: Cluster, namespace: str) -> str:
    maps = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": {"for": name}}}
        for name in ("one", "two")
    ]
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}}
    control_plane.apply(*maps, quota, namespace=namespace)
    return namespace


@pytest.mark.parametrize(
    "args",
    [
        ("configmap", "one"),
        ("configmaps", "-l", "for=two"),
        ("cm", "--field-selector", "metadata.name=one"),
        ("configmaps,secrets,quota",),
        ("deployments.apps",),
        ("Secret",),
    ],
    ids=str,
)
def test_in_a_namespace(control_plane: Cluster, filled: str, args: Sequence[str]) -> None:
    wanted, found = kubectl(control_plane, [*args, "-n", filled]), control_plane.get(*args, "-n", filled)
    assert found.get("items", found) == wanted.get("items", wanted)


def test_in_the_namespace_of_the_kubeconfig(control_plane: Cluster, filled: str, tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_bytes(control_plane.kubeconfig.read_bytes())
    words = ("config", "set-context", "--current", f"--namespace={filled}")
    checked([*control_plane.kubectl_command, "--kubeconfig", str(kubeconfig), *words])
    cluster = open_kubeconfig(kubeconfig, control_plane.kubectl_command)
    assert cluster.get("cm", "one") == kubectl(cluster, ["cm", "one"])


def test_of_the_cluster(control_plane: Cluster) -> None:
    name = "kubernetes.io/metadata.name=kube-system"
    assert control_plane.get("ns", "-l", name)["items"] == kubectl(control_plane, ["ns", "-l", name])["items"]


def test_what_is_not_there_is_an_error(control_plane: Cluster) -> None:
    with pytest.raises(RequestRefused, match="404"):
        control_plane.get("configmap", "none")
    with pytest.raises(LookupError, match="no kind nonsense"):
        control_plane.get("nonsense")
