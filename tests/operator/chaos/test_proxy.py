"""The faults of the chaos runs are real: each one is planted alone, and a client that retries meets it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.cluster.chaos.proxy import CALM, FaultProxy, FaultRates
from tests.cluster.chaos.scenario import through
from tests.support.devcluster import Cluster
from tests.support.jobs import job_json
from tests.support.kube_json import KubeJson
from zerotrain.operator.cluster.api import Api, ApiLimits, Request
from zerotrain.operator.cluster.connection import connect
from zerotrain.operator.cluster.errors import ApiError, Conflict, Gone, Unavailable, error_of
from zerotrain.operator.cluster.telemetry import Telemetry

pytestmark = pytest.mark.cluster
ONCE = ApiLimits(retries=0, timeout_s=60)


@pytest.fixture
def proxy(control_plane: Cluster) -> Iterator[FaultProxy]:
    found = FaultProxy(control_plane, random.Random(1))
    yield found
    found.stop()


@pytest.fixture
def kubeconfig(proxy: FaultProxy, control_plane: Cluster, operator_kubeconfig: Path, tmp_path: Path) -> Path:
    return through(proxy, control_plane, operator_kubeconfig, tmp_path)


def secret(name: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}


async def test_requests_are_refused_lost_or_carried_out_in_silence(
    proxy: FaultProxy, kubeconfig: Path, namespace: str, api: KubeJson
) -> None:
    path = f"/api/v1/namespaces/{namespace}/secrets"

    async def create(name: str) -> None:
        await client.call(Request(method="POST", path=path, kind="secrets", body=secret(name)))

    async with Api(await connect(kubeconfig), ONCE, Telemetry()) as client:
        proxy.fault_rates = CALM
        await create("made")
        for weather, name in (
            (FaultRates(refused=1.0), "refused"),
            (FaultRates(vanished=1.0), "vanished"),
            (FaultRates(unanswered=1.0), "unanswered"),
        ):
            proxy.fault_rates = weather
            with pytest.raises(Unavailable):
                await create(name)
    there = {item["metadata"]["name"] for item in api.get(path)["items"]}
    assert {"made", "unanswered"} <= there
    assert not {"refused", "vanished"} & there
    assert all(proxy.faults[name] for name in ("refused", "vanished", "unanswered"))


async def test_what_the_role_forbids_is_noted(proxy: FaultProxy, kubeconfig: Path, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/secrets"
    async with Api(await connect(kubeconfig), ONCE, Telemetry()) as client:
        with pytest.raises(ApiError):
            await client.call(Request(method="GET", path=path, kind="secrets"))
    assert f"GET {path}" in proxy.forbidden[0]


async def test_watches_expire_and_end(proxy: FaultProxy, kubeconfig: Path, namespace: str) -> None:
    async def watch() -> None:
        params = {"labelSelector": "zerotrain.dev/job"}
        async for event in client.watch("/api/v1/pods", params, kind="pods"):
            if event["type"] == "ERROR":
                raise error_of("WATCH", event["object"]["code"], b"")

    async with Api(await connect(kubeconfig), ONCE, Telemetry()) as client:
        proxy.fault_rates = FaultRates(expired=1.0)
        with pytest.raises(Gone):
            await watch()
        proxy.fault_rates = FaultRates(failing=1.0)
        with pytest.raises(Unavailable):
            await watch()
        proxy.fault_rates = FaultRates(dropped=1.0, watch_s=0.2)
        with pytest.raises(aiohttp.ClientError):
            await watch()


async def test_another_client_writes_first_and_answers_are_stale(
    proxy: FaultProxy, kubeconfig: Path, namespace: str, api: KubeJson
) -> None:
    jobs = f"/apis/zerotrain.dev/v1alpha1/namespaces/{namespace}/zerotrainingjobs"
    meta = {"name": "gpt", "namespace": namespace}
    job = api.post(jobs, job_json({"metadata": meta, "spec.managedBy": "example.com/nobody"}))
    async with Api(await connect(kubeconfig), ONCE, Telemetry()) as client:
        proxy.fault_rates = FaultRates(conflict=1.0)
        status = Request(
            method="PUT",
            path=f"{jobs}/gpt/status",
            kind="jobs",
            body={**job, "status": {"phase": "Pending"}},
        )
        with pytest.raises(Conflict):
            await client.call(status)
        read = Request(method="GET", path=f"{jobs}/gpt", kind="jobs")
        proxy.fault_rates = CALM
        first = await client.call(read)
        api.patch(f"{jobs}/gpt", {"metadata": {"labels": {"seen": "late"}}})
        proxy.fault_rates = FaultRates(stale=1.0)
        assert await client.call(read) == first
        proxy.fault_rates = CALM
        assert (await client.call(read))["metadata"]["labels"] == {"seen": "late"}


async def test_lists_are_never_old_whatever_their_size(
    proxy: FaultProxy, kubeconfig: Path, namespace: str, api: KubeJson
) -> None:
    """Lists are as fresh as an API server's quorum reads, on which an operator may rely."""
    jobs = f"/apis/zerotrain.dev/v1alpha1/namespaces/{namespace}/zerotrainingjobs"
    everything = Request(method="GET", path=jobs, kind="jobs", params={"limit": "500"})

    def add(name: str) -> None:
        meta = {"name": name, "namespace": namespace, "annotations": {"long": "x" * 100_000}}
        api.post(jobs, job_json({"metadata": meta, "spec.managedBy": "example.com/nobody"}))

    async with Api(await connect(kubeconfig), ONCE, Telemetry()) as client:
        for number in range(3):  # an API server compresses from 128 KiB on
            add(f"gpt-{number}")
            proxy.fault_rates = FaultRates(stale=1.0)
            assert len((await client.call(everything))["items"]) == number + 1
