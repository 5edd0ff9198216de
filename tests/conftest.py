"""Fixtures that every folder of tests may use: clusters, built and started on first use, and how ranks talk.

`ZEROTRAIN_TEST_KUBECONFIG` puts a cluster that exists in the place of the ones started here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.operator.call_record import FILE_VARIABLE
from tests.support.devcluster import (
    IMAGES,
    Cluster,
    Devcluster,
    UnsupportedError,
    build_image,
    build_tools,
    existing,
)
from tests.support.tools import alertmanager as alertmanager
from tests.support.tools import amtool as amtool
from tests.support.tools import build_tools_for
from tests.support.tools import helm as helm
from tests.support.tools import prometheus as prometheus
from tests.support.tools import promtool as promtool

PROFILE_OF_FIXTURE = {
    "control_plane": "control-plane",
    "devcluster": "control-plane",
    "simulated_cluster": "simulated",
    "node_tools": "node",
    "node_cluster": "node",
}


def pytest_configure(config: pytest.Config) -> None:
    """One record of the operators' requests for all workers of `pytest -n`, which inherit the variable."""
    if FILE_VARIABLE not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="zerotrain-calls-")
        config.add_cleanup(folder.cleanup)
        os.environ[FILE_VARIABLE] = str(Path(folder.name, "calls"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on clusters come first: they wait more than they compute, so two workers hardly disturb each
    other, and a build that fails is known early. Files stay together."""
    items.sort(key=lambda item: not _needs_cluster(item))


def _needs_cluster(item: pytest.Item) -> bool:
    fixtures = set(getattr(item, "fixturenames", ()))
    return bool(fixtures & PROFILE_OF_FIXTURE.keys()) or item.get_closest_marker("cluster") is not None


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


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Cluster]:
    """API server, etcd, controller-manager and scheduler; no node, so pods stay Pending."""
    found = existing()
    if found is not None:
        yield found
        return
    with Devcluster().lease("control-plane") as cluster:
        yield cluster


@pytest.fixture
def namespace(control_plane: Cluster) -> Iterator[str]:
    """A fresh namespace of `control_plane`."""
    with control_plane.namespace() as name:
        yield name


@pytest.fixture(scope="session")
def simulated_cluster() -> Iterator[Callable[[int], Cluster]]:
    """Call it with a number of nodes; clusters of the same size are shared by the session."""
    clusters: dict[int, Cluster] = {}
    with ExitStack() as stack:

        def start(num_nodes: int) -> Cluster:
            if num_nodes not in clusters:
                clusters[num_nodes] = stack.enter_context(
                    Devcluster().lease("simulated", "--nodes", str(num_nodes))
                )
            return clusters[num_nodes]

        yield start


@pytest.fixture(scope="session")
def node_cluster() -> Iterator[Cluster]:
    """A real node: pods are containers; the host image is loaded as localhost/zerotrain:dev."""
    found = existing()
    if found is not None:
        yield found
        return
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(Devcluster().lease("node", "--image", str(IMAGES / "host.tar")))
        except UnsupportedError as error:
            pytest.skip(str(error))
        yield cluster


@pytest.fixture
def node_namespace(node_cluster: Cluster) -> Iterator[str]:
    """A fresh namespace of `node_cluster`."""
    with node_cluster.namespace() as name:
        yield name


@pytest.fixture(params=["shared", "gloo"])
def each_transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs twice: its ranks share memory, and they send everything."""
    from tests.support.ranks import use_transport  # imports torch, which most folders do without

    with use_transport(request.param):
        yield request.param
