"""Fixtures that every folder of tests may use: clusters, built and started on first use, and how ranks talk.

`ZEROTRAIN_TEST_KUBECONFIG` puts a cluster that exists in the place of the ones started here.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.operator.call_record import FILE_VARIABLE
from tests.support import background
from tests.support.devcluster import (
    IMAGES,
    Cluster,
    Devcluster,
    Pool,
    UnsupportedError,
    build_image,
    build_tools,
    existing,
    wait_until,
)
from tests.support.device import TRANSPORTS, hide_gpus
from tests.support.handout import NODE_FILES, ByCluster, rank
from tests.support.tools import alertmanager as alertmanager
from tests.support.tools import amtool as amtool
from tests.support.tools import build_tools_for
from tests.support.tools import helm as helm
from tests.support.tools import kueue as kueue
from tests.support.tools import prometheus as prometheus
from tests.support.tools import promtool as promtool

PROFILE_OF_FIXTURE = {
    "control_plane": "control-plane",
    "devcluster": "control-plane",
    "simulated_cluster": "simulated",
    "node_tools": "node",
    "node_cluster": "node",
}


# The same examples at every run, and no limits of time: what a busy machine does is no finding.
settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("suite")

hide_gpus()

_pool = pytest.StashKey[Pool]()
_live_files = pytest.StashKey[frozenset[Path]]()


def pytest_configure(config: pytest.Config) -> None:
    """One record of the operators' requests for all workers of `pytest -n`, which inherit the variable."""
    if FILE_VARIABLE not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="zerotrain-calls-")
        config.add_cleanup(folder.cleanup)
        os.environ[FILE_VARIABLE] = str(Path(folder.name, "calls"))

    config.stash[_pool] = Pool(Devcluster())
    config.add_cleanup(config.stash[_pool].close)


# After pytest_configure, in which pytest itself begins to listen.
def pytest_sessionstart() -> None:
    background.listen()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    background.forget()
    # Numbers that a test draws without a seed are not those of whichever tests ran before it.
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByCluster | None:
    return ByCluster(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files. Raises UsageError for a file on the node that `handout.NODE_FILES` does not name."""
    live = frozenset(item.path for item in items if _needs_cluster(item))
    config.stash[_live_files] = live
    for item in items:
        if "node_cluster" in getattr(item, "fixturenames", ()) and not _is_node_file(item):
            raise pytest.UsageError(f"{item.nodeid} uses node_cluster: name its file in handout.NODE_FILES")
    items.sort(key=lambda item: rank(item.path, config.rootpath, live=item.path in live))


def _is_node_file(item: pytest.Item) -> bool:
    return item.path.relative_to(item.config.rootpath).as_posix() in NODE_FILES


def _needs_cluster(item: pytest.Item) -> bool:
    fixtures = set(getattr(item, "fixturenames", ()))
    return bool(fixtures & PROFILE_OF_FIXTURE.keys()) or item.get_closest_marker("cluster") is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End the shared clusters when only tests without one are left, so that these have the machine alone."""
    yield
    live = item.config.stash[_live_files]
    if item.path in live and nextitem is not None and nextitem.path not in live:
        item.config.stash[_pool].close()


# Before xdist reports what it found: no worker gets a test until all have.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Build before the first test: a cold build takes minutes, more than a test may."""
    if session.config.option.collectonly:
        return
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        return
    used = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        if existing() is None:
            _build_clusters(used)
        build_tools_for(used)


def _build_clusters(fixtures: set[str]) -> None:
    profiles = {profile for fixture, profile in PROFILE_OF_FIXTURE.items() if fixture in fixtures}
    for profile in sorted(profiles):
        build_tools(profile)
    if "node_cluster" in fixtures:
        build_image()


@pytest.fixture(scope="session")
def devcluster() -> Devcluster:
    """The supervisor's program, for tests that start and stop instances themselves."""
    return Devcluster()


@pytest.fixture(scope="session")
def node_tools() -> None:
    """The programs of a node are built, without its host image."""


# The fixtures of clusters are those of a file, and the pool outlives it.
@pytest.fixture(scope="module")
def control_plane(pytestconfig: pytest.Config) -> Cluster:
    """API server, etcd, controller-manager and scheduler; no node, so pods stay Pending."""
    return existing() or pytestconfig.stash[_pool].get("control-plane")


@pytest.fixture
def namespace(control_plane: Cluster) -> Iterator[str]:
    """A fresh namespace of `control_plane`."""
    with control_plane.namespace() as name:
        yield name


@pytest.fixture(scope="module")
def simulated_cluster(pytestconfig: pytest.Config) -> Callable[[int], Cluster]:
    """Call it with a number of nodes."""
    return lambda num_nodes: pytestconfig.stash[_pool].get("simulated", "--nodes", str(num_nodes))


@pytest.fixture(scope="module")
def node_cluster(pytestconfig: pytest.Config) -> Cluster:
    """A real node: pods are containers; the host image is loaded as localhost/zerotrain:dev."""
    found = existing()
    if found is not None:
        return found
    try:
        cluster = pytestconfig.stash[_pool].get("node", "--image", str(IMAGES / "host.tar"))
    except UnsupportedError as error:
        pytest.skip(str(error))
    # An installation in a namespace that is still being deleted would be refused.
    wait_until(lambda: not _is_ending(cluster, "zerotrain-system"), "the last file's operator")
    return cluster


def _is_ending(cluster: Cluster, namespace: str) -> bool:
    phase = ("-o", "jsonpath={.status.phase}", "--ignore-not-found")
    return cluster.kubectl("get", "namespace", namespace, *phase).stdout == "Terminating"


@pytest.fixture
def node_namespace(node_cluster: Cluster) -> Iterator[str]:
    """A fresh namespace of `node_cluster`."""
    with node_cluster.namespace() as name:
        yield name


@pytest.fixture(params=TRANSPORTS)
def each_transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs once per way in which ranks talk there: they share memory, and they send everything."""
    from tests.support.ranks import use_transport  # imports torch, which most folders do without

    with use_transport(request.param):
        yield request.param
