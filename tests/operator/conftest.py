"""Fixtures for tests that run the real operator process against a real API server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operator.kube_json import KubeJson
from tests.operator.operator_process import install
from tests.support.devcluster import Cluster


@pytest.fixture(scope="session")
def operator_kubeconfig(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped manifests are applied; this kubeconfig has the rights of their ServiceAccount."""
    return install(control_plane, tmp_path_factory.mktemp("operator"))


@pytest.fixture
def api(control_plane: Cluster) -> KubeJson:
    """Full rights, for the doubles."""
    return KubeJson(control_plane)
