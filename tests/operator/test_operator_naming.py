"""The Service of worker 0: looked for before the pods, made once worker 0 has an address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.operator.api_double import Answer, ApiDouble, failure, served
from tests.operator.kube_json import KubeJson
from tests.operator.live_job import LiveJob
from tests.operator.operator_process import operator
from tests.operator.test_operator_executor import CORE, CREATE, EXISTS, accept_all, executor, job, mine
from tests.support.devcluster import Cluster, wait_until
from zerotrain.operator.cluster.executor import ActionRefused
from zerotrain.operator.reconcile import NameMaster

SERVICES, SERVICE = f"{CORE}/services", f"{CORE}/services/gpt"
NAME = NameMaster(attempt=1)
UID = job()["metadata"]["uid"]


async def test_it_is_made_after_the_pods() -> None:
    double = ApiDouble()
    accept_all(double)
    async with served(double) as api:
        hands = executor(api)
        await hands.perform(job(), [CREATE])
        assert (double.asked(f"GET {SERVICE}"), double.asked(f"POST {SERVICES}")) == (1, 0)
        assert hands.memories.of(UID).named is None
        await hands.perform(job(), [NAME])
        assert double.asked(f"POST {SERVICES}") == 1
        assert hands.memories.of(UID).named == 1


async def test_the_next_attempt_finds_it() -> None:
    double = ApiDouble()
    accept_all(double)
    double.on(f"GET {SERVICE}", (200, mine({})))
    async with served(double) as api:
        hands = executor(api)
        await hands.perform(job(), [CREATE])
        assert hands.memories.of(UID).named == 1
    assert double.asked(f"POST {SERVICES}") == 0


async def test_a_name_that_is_taken_is_told_before_any_pod() -> None:
    double = ApiDouble()
    accept_all(double)
    double.on(f"GET {SERVICE}", (200, {"kind": "Service", "metadata": {"name": "gpt"}}))
    async with served(double) as api:
        with pytest.raises(ActionRefused, match="Service gpt belongs to somebody else; delete it or rename"):
            await executor(api).perform(job(), [CREATE])
    assert double.asked(f"POST {CORE}/pods") == 0


@pytest.mark.parametrize(
    ("made", "there", "named"),
    [
        (EXISTS, (200, mine({})), 1),
        (EXISTS, (200, {"kind": "Service", "metadata": {"name": "gpt"}}), None),
        (failure(403, "Forbidden", "exceeded quota: services"), failure(404, "NotFound"), None),
    ],
    ids=["made by an operator that died", "taken meanwhile", "refused"],
)
async def test_one_that_is_there_must_be_the_jobs(made: Answer, there: Answer, named: int | None) -> None:
    double = ApiDouble()
    double.on(f"POST {SERVICES}", made)
    double.on(f"GET {SERVICE}", there)
    async with served(double) as api:
        hands = executor(api)
        if named is None:
            with pytest.raises(ActionRefused):
                await hands.perform(job(), [NAME])
        else:
            await hands.perform(job(), [NAME])
        assert hands.memories.of(UID).named == named


@pytest.mark.cluster
def test_the_service_comes_with_the_address_of_worker_0(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    core = f"/api/v1/namespaces/{namespace}"
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    with operator(operator_kubeconfig, tmp_path):
        live = LiveJob(control_plane, namespace)
        wait_until(lambda: {"Pod/gpt-1-0", "Pod/gpt-1-1"} <= set(live.owned()), "the pods")
        other = {"status": {"podIP": "10.1.2.4", "podIPs": [{"ip": "10.1.2.4"}]}}
        api.patch(f"{core}/pods/gpt-1-1/status", other)
        wait_until(lambda: live.status().get("attempt") == 1, "the attempt to be written")
        assert "Service/gpt" not in live.owned()
        api.patch(
            f"{core}/pods/gpt-1-0/status", {"status": {"podIP": "10.1.2.3", "podIPs": [{"ip": "10.1.2.3"}]}}
        )

        def behind() -> list[dict[str, Any]]:
            return [endpoint for item in api.get(slices)["items"] for endpoint in item["endpoints"] or ()]

        (found,) = wait_until(behind, "the endpoint")
        assert (found["addresses"], found["hostname"]) == (["10.1.2.3"], "gpt-1-0")
