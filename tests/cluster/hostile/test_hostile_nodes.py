"""Nodes stay usable for all while a tenant's quota allows none of its pods."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.hostile.arena import Arena, arena
from tests.cluster.hostile.bodies import job
from tests.cluster.hostile.complaints import statuses
from tests.cluster.hostile.surroundings import quota
from tests.support.devcluster import Cluster, wait_until
from zerotrain.operator.api.crd import openapi_schema

pytestmark = pytest.mark.cluster

NODES, GPUS = 4, 8
"""Number of nodes in the cluster, and of GPUs in each node."""

GANGS = openapi_schema()["properties"]["spec"]["properties"]["scheduling"]["properties"]["gang"]["enum"]
NOT_SERVED = ("Native", "Volcano", "Coscheduling")
"""Gangs for which the development cluster has neither API nor scheduler."""

WHOLE_NODES = {"spec.resources": {"cpu": "1", "memory": "8Gi", "gpus": {"count": GPUS, "memory": "80Gi"}}}


@pytest.fixture(scope="module")
def stage(
    request: pytest.FixtureRequest,
    simulated_cluster: Callable[[int], Cluster],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Arena]:
    cluster = simulated_cluster(NODES)
    with arena(cluster, tmp_path_factory.mktemp("hostile"), "nodes") as found:
        found.measure_baseline()
        yield found
        found.clean()
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{found.report.text()}", flush=True)


@pytest.mark.parametrize("gang", [gang for gang in GANGS if gang not in NOT_SERVED])
def test_a_quota_of_zero_keeps_no_node(stage: Arena, gang: str) -> None:
    nothing = quota({"pods": "0", "requests.nvidia.com/gpu": "0"})
    stage.cluster.apply(nothing, namespace=stage.tenant.namespace)
    nodes = {**WHOLE_NODES, "spec.scheduling": {"gang": gang}}
    with stage.round():
        first, _ = stage.bystander(2, nodes)
        wait_until(lambda: placed(stage, first.name) == 2, "two nodes to be taken")
        hog = job(f"hog-{gang.lower()}", {"spec.workers": NODES, **nodes})
        answer = stage.tenant.create(hog)
        stage.wait_for_conditions([hog])
        second, waited = stage.bystander(2, nodes)
        stage.note(f"quota of zero, gang {gang}", [answer], waited)
        wait_until(lambda: placed(stage, second.name) == 2, "the two nodes that are left to be used")
        shown = json.dumps(statuses(stage.cluster, "-n", stage.neighbour))
        assert "hog-" not in shown, "a neighbour reads names of this tenant's jobs"
        stage.expect(stage.complaints())


def placed(stage: Arena, name: str) -> int:
    """Return the number of pods of the neighbour's job that have a node."""
    return sum(bool(pod["spec"].get("nodeName")) for pod in stage.pods_of(stage.neighbour, name))
