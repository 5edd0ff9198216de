"""Fixtures for every folder of tests: clusters, built and started on first use, and transports of ranks.

`ZEROTRAIN_TEST_KUBECONFIG` names an existing cluster that replaces the ones started here.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.operator.call_record import FILE_VARIABLE
from tests.support import background, builds, parts, tier_guard, tiers
from tests.support.devcluster import IMAGES, Cluster, Devcluster, Pool, UnsupportedError, existing, wait_until
from tests.support.device import TRANSPORTS, hide_gpus
from tests.support.tools import alertmanager as alertmanager
from tests.support.tools import amtool as amtool
from tests.support.tools import helm as helm
from tests.support.tools import kueue as kueue
from tests.support.tools import prometheus as prometheus
from tests.support.tools import promtool as promtool
from tests.support.xdist_schedule import NODE_FILES, ByCluster, place

# The same examples at every run, and no time limits: slowness of a busy machine is not a finding.
settings.register_profile(
    "suite",
    max_examples=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
settings.load_profile("suite")

hide_gpus()

_pool = pytest.StashKey[Pool]()
_builds = pytest.StashKey[builds.Builds]()
_left_out = pytest.StashKey[list[Path]]()
_part = pytest.StashKey[frozenset[Path]]()
_live_files = pytest.StashKey[frozenset[Path]]()


def pytest_configure(config: pytest.Config) -> None:
    """Share one record of the operators' requests, and one of the builds, among all workers of `pytest -n`,
    which inherit the variables.
    """
    if builds.FOLDER_VARIABLE not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="zerotrain-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ[builds.FOLDER_VARIABLE] = folder.name
        os.environ.setdefault(FILE_VARIABLE, str(Path(folder.name, "calls")))
        os.environ[parts.VARIABLE] = str(parts.number_of_parts(config))
    config.stash[_pool] = Pool(Devcluster())
    config.add_cleanup(config.stash[_pool].close)
    config.stash[_builds] = builds.Builds(Path(os.environ[builds.FOLDER_VARIABLE]))
    config.add_cleanup(config.stash[_builds].stop)
    config.stash[_left_out] = []
    config.pluginmanager.register(tier_guard)


# Runs after pytest_configure, in which pytest itself begins to listen.
def pytest_sessionstart() -> None:
    background.listen()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    background.forget()
    # Random numbers that a test draws without a seed must not depend on the tests before it.
    if (torch := sys.modules.get("torch")) is not None:
        # torch.manual_seed records a stack for every kind of device: a millisecond before each of 6,000
        # tests.
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByCluster | parts.EachItsOwn | None:
    if config.getoption("dist") != "loadfile":
        return None
    if os.environ[parts.VARIABLE] != "1":
        return parts.EachItsOwn(config, log)
    return ByCluster(config, log, built=config.stash[_builds].all_done)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of a file of which `-m` selects no test, or which another process runs: torch alone
    takes seconds.
    """
    if not collection_path.match("test_*.py") or not collection_path.is_file():
        return None
    if not tiers.is_left_out(collection_path, config.option.markexpr) and _is_of_this_part(
        collection_path, config
    ):
        return None
    config.stash[_left_out].append(collection_path)
    return True


def _is_of_this_part(file: Path, config: pytest.Config) -> bool:
    worker, number = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get(parts.VARIABLE, "1"))
    if worker is None or number == 1:
        return True
    if _part not in config.stash:
        every = sorted(config.rootpath.glob("tests/**/test_*.py"))
        there = [path for path in every if not tiers.is_left_out(path, config.option.markexpr)]
        config.stash[_part] = parts.part_of(there, int(worker.removeprefix("gw")), number)
    return file in config.stash[_part]


# Runs before pytest removes what `-m` and `-k` deselect: a test's tier is checked whether or not it runs.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check names and tiers and order the files. Raises UsageError naming a test or file that is wrong."""
    found = tiers.problems(items)
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.stash[_left_out]:
        found += tiers.too_many_slow(items)
    if found:
        raise pytest.UsageError(*found)
    for item in items:
        if re.search(r" at 0x[0-9a-f]{6}", item.nodeid):
            raise pytest.UsageError(f"{item.nodeid} has another name in each process; give its rows ids")
        if "node_cluster" in _fixtures(item) and _name(item) not in NODE_FILES:
            raise pytest.UsageError(
                f"{item.nodeid} uses node_cluster: name its file in xdist_schedule.NODE_FILES"
            )
    config.stash[_live_files] = frozenset(item.path for item in items if _asks_for(item) & builds.CLUSTERS)
    dearest: dict[Path, int] = {}
    for item in items:
        dearest[item.path] = max(dearest.get(item.path, 0), tiers.TIERS.index(tiers.tier_of(item)))
    items.sort(key=lambda item: place(_name(item), dearest[item.path]))


def _name(item: pytest.Item) -> str:
    return item.path.relative_to(item.config.rootpath).as_posix()


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


def _asks_for(item: pytest.Item) -> set[str]:
    """Return the builds that this test needs."""
    asked = set(builds.needed(_fixtures(item)))
    return asked if existing() is None else asked - builds.CLUSTERS


def _fill_hypothesis_tables() -> None:
    """Make hypothesis build its tables of Unicode, which takes a second in a fresh clone, before any test."""

    @settings(max_examples=1)
    @given(st.text())
    def draw(_: str) -> None: ...

    draw()


# The first of the wrappers: a unit test that a cluster's end follows does not answer for it.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End the shared clusters when only tests without one are left, so that these have the machine alone."""
    yield
    live = item.config.stash[_live_files]
    if item.path in live and nextitem is not None and nextitem.path not in live:
        item.config.stash[_pool].close()


# Runs before xdist reports what it found: no worker gets a test until all have.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the builds, in one process for all, and go on to the tests."""
    if session.config.option.collectonly:
        return
    # The tests stay to the end; unfrozen, every full collection visits them all, for up to a second.
    gc.collect()
    gc.freeze()
    # Hypothesis marks its tests after pytest_collection_modifyitems above has run.
    if any(item.get_closest_marker("hypothesis") for item in session.items):
        _fill_hypothesis_tables()
    made = session.config.stash[_builds]
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        made.show_on(sys.stderr.fileno())
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        asked = [build for item in session.items for build in sorted(_asks_for(item))]
        made.start(list(dict.fromkeys(asked)))


# Runs outside of pytest-timeout's timer, which starts in its own wrapper of this hook.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Wait for the builds that this test needs. A failed build fails the test, in its fixture."""
    for build in sorted(_asks_for(item)):
        item.config.stash[_builds].finish(build)
    return (yield)


@pytest.fixture(scope="session")
def built(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Function of a fixture's name that raises ClusterError if a build that the fixture needs has failed."""

    def require(fixture: str) -> None:
        for build in builds.OF_FIXTURE[fixture]:
            if build not in builds.CLUSTERS or existing() is None:
                pytestconfig.stash[_builds].require(build)

    return require


@pytest.fixture(scope="session")
def devcluster(built: Callable[[str], None]) -> Devcluster:
    """The supervisor's program, for tests that start and stop instances themselves."""
    built("devcluster")
    return Devcluster()


@pytest.fixture(scope="session")
def node_tools(built: Callable[[str], None]) -> None:
    """Require the programs of a node, without its host image."""
    built("node_tools")


# The fixtures of clusters have module scope, and the pool outlives them.
@pytest.fixture(scope="module")
def control_plane(pytestconfig: pytest.Config, built: Callable[[str], None]) -> Cluster:
    """API server, etcd, controller-manager and scheduler; no node, so pods stay Pending."""
    built("control_plane")
    return existing() or pytestconfig.stash[_pool].get("control-plane")


@pytest.fixture
def namespace(control_plane: Cluster) -> Iterator[str]:
    """A fresh namespace of `control_plane`."""
    with control_plane.namespace() as name:
        yield name


@pytest.fixture(scope="module")
def simulated_cluster(pytestconfig: pytest.Config, built: Callable[[str], None]) -> Callable[[int], Cluster]:
    """Function of a number of nodes that returns a simulated cluster."""
    built("simulated_cluster")
    return lambda num_nodes: pytestconfig.stash[_pool].get("simulated", "--nodes", str(num_nodes))


@pytest.fixture(scope="module")
def node_cluster(pytestconfig: pytest.Config, built: Callable[[str], None]) -> Cluster:
    """A real node: pods are containers; the host image is loaded as localhost/zerotrain:dev."""
    built("node_cluster")
    found = existing()
    if found is not None:
        return found
    try:
        cluster = pytestconfig.stash[_pool].get("node", "--image", str(IMAGES / "host.tar"))
    except UnsupportedError as error:
        pytest.skip(str(error))
    # The API server would reject an installation in a namespace that is still being deleted.
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
    """Run the test once per transport of the ranks: shared memory, and messages only."""
    from tests.support.ranks import use_transport  # imports torch, which most folders do without

    with use_transport(request.param):
        yield request.param
