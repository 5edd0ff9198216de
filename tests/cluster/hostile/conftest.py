"""A cluster per file for attacks, as the stored objects would disturb every other test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.hostile.arena import Arena, arena
from tests.support.devcluster import Devcluster, checked


@pytest.fixture(scope="module")
def fresh(
    request: pytest.FixtureRequest, devcluster: Devcluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Arena]:
    """Provide an arena without a running operator. Its report is printed at the end.

    The cluster has no nodes. A scheduler would try all pods again with every pod that is deleted, and keep
    half a core busy.
    """
    title = request.node.name
    scheduler = ("--component", "kube-scheduler")
    with devcluster.lease("control-plane") as cluster:
        checked(devcluster.command("stop-component", *scheduler, name=cluster.name))
        with arena(cluster, tmp_path_factory.mktemp("hostile"), title) as found:
            try:
                yield found
            finally:
                capture = request.config.pluginmanager.getplugin("capturemanager")
                with capture.global_and_fixture_disabled():
                    print(f"\n{found.report.text()}", flush=True)
