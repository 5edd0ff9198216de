"""Fixtures for tests that run the real operator process against a real API server, and the record of the
requests of all those operators (`call_record.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.operator.operator_process import install
from tests.support.devcluster import Cluster
from tests.support.kube_json import KubeJson
from tests.support.xdist_schedule import LAST_FILE

_deselected = pytest.StashKey[bool]()
_collected = pytest.StashKey[frozenset[Path]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_deselected] = False


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items[:1]:
        item.config.stash[_deselected] = True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[_collected] = frozenset(item.path for item in items)
    last = config.rootpath / LAST_FILE
    items.sort(key=lambda item: item.path == last)


@pytest.fixture
def whole_folder(pytestconfig: pytest.Config) -> bool:
    """Return whether every test of this folder is part of the session."""
    files = set(Path(__file__).parent.rglob("test_*.py"))
    return not pytestconfig.stash[_deselected] and files <= pytestconfig.stash[_collected]


@pytest.fixture(scope="session")
def installed() -> dict[Cluster, Path]:
    """Clusters that have the manifests -> the operator's kubeconfig."""
    return {}


@pytest.fixture(scope="module")
def operator_kubeconfig(
    control_plane: Cluster, installed: dict[Cluster, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Kubeconfig with the rights of the operator's ServiceAccount, after the shipped manifests are
    applied.
    """
    if control_plane not in installed:
        installed[control_plane] = install(control_plane, tmp_path_factory.mktemp("operator"))
    return installed[control_plane]


@pytest.fixture
def api(control_plane: Cluster) -> KubeJson:
    """Access to the API with full rights, for the doubles."""
    return control_plane.api
