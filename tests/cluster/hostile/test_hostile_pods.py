"""Forged statuses of pods, and workers with false reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.cluster.hostile.arena import Arena
from tests.cluster.hostile.bodies import COLLECTIONS, job
from tests.cluster.hostile.complaints import command_complaints, statuses
from tests.cluster.hostile.forgeries import STATUSES, container
from tests.cluster.hostile.liars import LIARS, Liar
from tests.cluster.hostile.texts import DIRT
from tests.support.devcluster import wait_until

pytestmark = pytest.mark.cluster

Json = dict[str, Any]


@pytest.fixture(scope="module")
def stage(fresh: Arena) -> Arena:
    fresh.measure_baseline()
    return fresh


def started(stage: Arena, names: Sequence[str], **spec: Any) -> dict[str, Json]:
    """Create a job of one worker for every name, and return its pod by name."""
    for name in names:
        answer = stage.tenant.create(job(name, spec))
        assert answer.accepted, f"{name}: {answer}"
    found: dict[str, Json] = {}
    for name in names:
        stage.wait_for_pods(stage.tenant.namespace, name, 1)
        (found[name],) = stage.pods_of(stage.tenant.namespace, name)
    return found


def forge(stage: Arena, pod: Json, status: Json) -> None:
    """Write a status in place of the kubelet. Raises RuntimeError if the API server rejects it."""
    path = f"{COLLECTIONS['Pod'].format(stage.tenant.namespace)}/{pod['metadata']['name']}/status"
    stage.api.patch(path, {"status": status})


def post_events(stage: Arena, pod: Json) -> None:
    """Write events as a kubelet does."""
    meta = pod["metadata"]
    regarding = {"kind": "Pod", "name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]}
    for reason in ("FailedMount", "Failed", "BackOff", "FailedScheduling"):
        body = {
            "metadata": {"name": f"{meta['name']}.{reason.lower()}", "namespace": meta["namespace"]},
            "involvedObject": {"apiVersion": "v1", **regarding},
            "reason": reason,
            "message": DIRT,
            "type": "Warning",
            "source": {"component": "kubelet"},
        }
        stage.api.post(f"/api/v1/namespaces/{meta['namespace']}/events", body)


def check(stage: Arena, names: Sequence[str]) -> None:
    wrong = stage.complaints()
    wrong += command_complaints(stage.cluster, list(names), "get", "-A")
    for name in names:
        wrong += command_complaints(stage.cluster, [name], "describe", name, "-n", stage.tenant.namespace)
    stage.expect(wrong)


def test_statuses_that_nodes_forge(stage: Arena) -> None:
    refused = set()
    with stage.round():
        pods = started(stage, list(STATUSES))
        for name, status in STATUSES.items():
            post_events(stage, pods[name])
            try:
                forge(stage, pods[name], status)
            except RuntimeError:
                refused.add(name)
            stage.note(name, [], stage.work())
        assert len(refused) <= len(STATUSES) // 4, f"the API server takes too few of them: not {refused}"
        ends = {name for name, status in STATUSES.items() if status.get("phase") == "Failed"}
        wait_until(lambda: have_failures(stage, ends - refused), "the operator to hear of what ended")
        check(stage, list(STATUSES))


def have_failures(stage: Arena, names: set[str]) -> bool:
    """Return whether all these jobs have a recorded failure."""
    found = statuses(stage.cluster, "-n", stage.tenant.namespace)
    return names <= {name.partition("/")[2] for name, status in found.items() if status.get("failures")}


@pytest.fixture
def liars() -> Iterator[dict[str, Liar]]:
    running: dict[str, Liar] = {}
    yield running
    for liar in running.values():
        liar.close()


def test_workers_that_lie(stage: Arena, liars: dict[str, Liar]) -> None:
    with stage.round():
        pods = started(stage, list(LIARS))
        for name, answer in LIARS.items():
            uid = pods[name]["metadata"]["labels"]["zerotrain.dev/job-uid"]
            liars[name] = Liar(answer(name, uid))
            liars[name].start()
            forge(stage, pods[name], runs_at(liars[name].address))
            stage.note(name, [], stage.work())
        wait_until(lambda: all(liar.asked for liar in liars.values()), "every liar to be asked", every_s=1)
        stage.note("all liars asked", [], stage.work())
        check(stage, list(LIARS))


def runs_at(address: str) -> Json:
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")],
        "containerStatuses": [container({"running": {"startedAt": "2026-01-01T00:00:00Z"}}, ready=True)],
    }
