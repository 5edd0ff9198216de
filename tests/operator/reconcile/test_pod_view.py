"""The view of a pod in which other containers run beside or before the worker's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import ago
from zerotrain.contract.progress import Termination
from zerotrain.operator.reconcile import PodView, WorkerState, pod_view

pytestmark = pytest.mark.unit


RUNS: dict[str, Any] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


GOES = {"deletionTimestamp": "2026-01-01T00:00:30Z"}


def ended(code: int) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "finishedAt": "2026-01-01T00:00:00Z"}}


def worker(state: dict[str, Any] = RUNS, *, ready: bool = True) -> dict[str, Any]:
    return {"name": "worker", "ready": ready, "state": state}


def sidecar(*, ready: bool) -> dict[str, Any]:
    return {"name": "proxy", "ready": ready, "state": RUNS}


def view(
    *containers: dict[str, Any],
    phase: str = "Running",
    deleted: bool = False,
    before: list[dict[str, Any]] | None = None,
    **status: Any,
) -> PodView:
    labels = {"zerotrain.dev/job": "gpt", "zerotrain.dev/attempt": "1", "zerotrain.dev/rank": "0"}
    pod = {
        "metadata": {"name": "gpt-1-0", "uid": "u", "labels": labels, **(GOES if deleted else {})},
        "spec": {"initContainers": before or []},
        "status": {"phase": phase, "containerStatuses": list(containers), **status},
    }
    found = pod_view(pod, seen_at=ago(0))
    assert found is not None
    return found


def is_not_ready(reason: str | None) -> list[dict[str, Any]]:
    return [{"type": "Ready", "status": "False", **({"reason": reason} if reason else {})}]


@pytest.mark.parametrize(
    ("ready", "reason", "found"),
    [
        pytest.param(True, "ContainersNotReady", True, id="another-container-is-not"),
        pytest.param(False, "ContainersNotReady", False, id="the-workers-is-not"),
        pytest.param(True, None, False, id="the-node-is-silent"),
    ],
)
def test_a_worker_is_ready_whatever_runs_next_to_it(ready: bool, reason: str | None, found: bool) -> None:
    seen = view(worker(ready=ready), sidecar(ready=False), conditions=is_not_ready(reason))
    assert seen.ready is found


@pytest.mark.parametrize(
    ("phase", "state", "lingers"),
    [
        ("Running", ended(0), True),
        ("Running", ended(1), True),
        ("Running", RUNS, False),
        ("Succeeded", ended(0), False),
        ("Failed", ended(1), False),
    ],
)
def test_a_pod_lingers_while_something_outlives_its_worker(
    phase: str, state: dict[str, Any], lingers: bool
) -> None:
    assert view(worker(state), phase=phase).lingers is lingers


@pytest.mark.parametrize("code", [1, 3, 65, 75, 82, 84, 137, 143])
def test_an_init_container_that_failed_is_named_with_its_own_code(code: int) -> None:
    """The worker's table of exit codes applies to its own program alone, not to an init container's code."""
    seen = view(phase="Failed", initContainerStatuses=[{"name": "fetch", "state": ended(code)}])
    assert (seen.failed_container, seen.exit_code, seen.worker_code) == ("fetch", code, None)
    assert seen.state is WorkerState.FAILED


@pytest.mark.parametrize(("attempt", "exception"), [(0, "no MASTER_ADDR"), (1, "no MASTER_ADDR"), (2, None)])
def test_a_launcher_that_could_not_read_its_attempt_is_believed(attempt: int, exception: str | None) -> None:
    message = Termination(attempt=attempt, code=69, exception="no MASTER_ADDR").to_json()
    state = {"terminated": {**ended(69)["terminated"], "message": message}}
    found = view(worker(state), phase="Failed").termination
    assert (found.exception if found else None) == exception


@pytest.mark.parametrize(("policy", "found"), [("Always", None), (None, 143)])
def test_a_sidecar_that_ended_with_its_pod_is_not_what_failed(policy: str | None, found: int | None) -> None:
    """A kubelet restarts a sidecar for as long as the pod lives, so that no pod fails by it."""
    sidecar = {"name": "proxy", **({"restartPolicy": policy} if policy else {})}
    statuses = [{"name": "proxy", "state": ended(143)}]
    seen = view(phase="Failed", before=[sidecar], initContainerStatuses=statuses, reason="NodeShutdown")
    assert seen.exit_code == found
    assert seen.pod_reason == "NodeShutdown"
