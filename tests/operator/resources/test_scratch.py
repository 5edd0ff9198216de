"""Limits on a worker's use of its node's disk: every folder that lies there has one, and so has their sum."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import make_job
from zerotrain.operator.api.quantity import Quantity
from zerotrain.operator.reconcile.yield_request import frozen_hash
from zerotrain.operator.resources import ResourceOptions, worker_pod
from zerotrain.operator.resources.amounts import requests_of
from zerotrain.operator.resources.kueue import made_from, workload

pytestmark = pytest.mark.unit

Json = dict[str, Any]
GIB = 1 << 30
OWN = [
    {"name": "cache", "emptyDir": {}},
    {"name": "bounded", "emptyDir": {"sizeLimit": "3Gi"}},
    {"name": "tmpfs", "emptyDir": {"medium": "Memory"}},
]
NVME = {"spec.nvme": {"size": "100Gi"}}
CLASS = {"spec.nvme": {"size": "100Gi", "storageClassName": "fast"}}
ONE = {"spec.workers": 1, "spec.checkpoint": {"volume": {"emptyDir": {}}}}


def pod(changes: Json | None = None) -> Json:
    return dict(worker_pod(make_job(changes), 1, 0, ResourceOptions())["spec"])


def limits(changes: Json | None = None) -> dict[str, str | None]:
    """Return the size limits of the pod's folders on the node's disk."""
    folders = {item["name"]: item["emptyDir"] for item in pod(changes)["volumes"] if "emptyDir" in item}
    return {name: item.get("sizeLimit") for name, item in folders.items() if item.get("medium") != "Memory"}


def disk(changes: Json | None = None) -> tuple[str, str]:
    """Return the worker's limit and request."""
    resources = pod(changes)["containers"][0]["resources"]
    limit, request = (resources[part]["ephemeral-storage"] for part in ("limits", "requests"))
    return str(limit), str(request)


@pytest.mark.parametrize("scratch", [None, {"size": "7Gi"}, {"ephemeralStorage": "9Gi"}])
@pytest.mark.parametrize("base", [{}, NVME, CLASS, ONE], ids=["plain", "nvme", "class", "one"])
@pytest.mark.parametrize("own", [[], OWN], ids=["none", "own"])
def test_every_folder_has_a_limit_and_so_has_their_sum(scratch: Json | None, base: Json, own: Any) -> None:
    changes = {**base, "spec.podTemplate.volumes": own, **({"spec.scratch": scratch} if scratch else {})}
    found = limits(changes)
    size = (scratch or {}).get("size", "50Gi")
    assert found.pop("bounded", "3Gi") == "3Gi"
    assert found.pop("zerotrain-nvme", "100Gi") == "100Gi"
    assert "zerotrain-tmp" in found
    assert set(found.values()) == {size}
    given = (scratch or {}).get("ephemeralStorage")
    together = sum(Quantity(str(limit)).num_bytes for limit in limits(changes).values())
    assert Quantity(disk(changes)[0]).num_bytes == (
        Quantity(given).num_bytes if given else together + 2 * GIB
    )


def test_no_node_is_asked_to_set_it_aside() -> None:
    """The request covers only the volume of the spill, which is certainly filled."""
    assert disk() == ("52Gi", "0")
    assert disk(NVME) == ("152Gi", "100Gi")
    assert disk(CLASS) == ("52Gi", "0")
    assert "ephemeral-storage" not in requests_of(pod())
    assert requests_of(pod(NVME))["ephemeral-storage"] == 100 * GIB * 1000


def test_a_queue_without_such_a_resource_admits_the_workers() -> None:
    def counted(changes: Json) -> Json:
        job = make_job({**changes, "spec.scheduling": {"queueName": "q"}})
        worker = worker_pod(job, 1, 0, ResourceOptions())
        (pod_set,) = workload(job, "kueue.x-k8s.io/v1beta2", 2, worker, None)["spec"]["podSets"]
        return dict(pod_set["template"]["spec"]["containers"][0].get("resources", {}))

    assert counted({}) == {}
    cpu = {"spec.resources": {"cpu": "2"}}
    assert counted(cpu) == {"limits": {"cpu": "2"}, "requests": {"cpu": "2"}}
    assert counted(NVME)["requests"] == {"ephemeral-storage": "100Gi"}


def test_another_limit_disturbs_no_running_attempt() -> None:
    before, after = make_job(), make_job({"spec.scratch": {"size": "7Gi", "ephemeralStorage": "8Gi"}})
    assert frozen_hash(before.spec) == frozen_hash(after.spec)
    assert made_from(before.spec) == made_from(after.spec)
