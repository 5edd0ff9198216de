"""Fixtures for the client and its commands against a real API server, a real operator and doubles of
nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.operator.operator_process import install, operator, write_kubeconfig
from tests.support.devcluster import Cluster
from tests.support.kube_json import KubeJson


@pytest.fixture(scope="module")
def operator_kubeconfig(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kubeconfig with the rights of the operator's ServiceAccount, after the shipped manifests are
    applied.
    """
    return install(control_plane, tmp_path_factory.mktemp("operator"))


@pytest.fixture(scope="module")
def running_operator(operator_kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One leading operator for the tests of a file."""
    with operator(operator_kubeconfig, tmp_path_factory.mktemp("leading")):
        yield


@pytest.fixture
def api(control_plane: Cluster) -> KubeJson:
    """Access to the API with full rights, for the doubles."""
    return control_plane.api


@pytest.fixture
def unprivileged(control_plane: Cluster, namespace: str, tmp_path: Path) -> Path:
    """Kubeconfig of a user without any right."""
    control_plane.kubectl("create", "serviceaccount", "nobody", "-n", namespace)
    token = control_plane.kubectl("create", "token", "nobody", "-n", namespace).stdout.strip()
    return write_kubeconfig(control_plane, token, tmp_path / "nobody.kubeconfig")
