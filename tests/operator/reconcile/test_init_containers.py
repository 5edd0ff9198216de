"""Init containers and sidecars are told apart from ranks: by name, with their own code, reason and
message.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.operator.reconcile_builders import NOW, ago, ended, job, running, seen, stamp, status
from zerotrain.contract.progress import Termination
from zerotrain.operator.reconcile import LogView, Plan, PodView, SaveLog, pod_view, reconcile

pytestmark = pytest.mark.unit

Json = dict[str, Any]


def ending(code: int, message: str = "", reason: str = "Error", *, s_ago: float = 5) -> Json:
    end = {"exitCode": code, "reason": reason, "message": message, "finishedAt": stamp(ago(s_ago))}
    return {"terminated": end}


def declared(name: str, sidecars: tuple[str, ...]) -> Json:
    return {"name": name, **({"restartPolicy": "Always"} if name in sidecars else {})}


def pod(
    *,
    before: tuple[Json, ...] = (),
    worker: Json | None = None,
    sidecars: tuple[str, ...] = (),
    phase: str = "Failed",
    deleted: bool = False,
    **more: Any,
) -> PodView:
    labels = {"zerotrain.dev/job": "gpt", "zerotrain.dev/attempt": "1", "zerotrain.dev/rank": "0"}
    meta = {"name": "gpt-1-0", "uid": "pod-1-0", "labels": labels}
    gone = {"deletionTimestamp": stamp(ago(10)), "deletionGracePeriodSeconds": 30} if deleted else {}
    found = pod_view(
        {
            "metadata": {**meta, **gone},
            "spec": {
                "nodeName": "node-0",
                "initContainers": [declared(item["name"], sidecars) for item in before],
            },
            "status": {
                "phase": phase,
                "initContainerStatuses": list(before),
                "containerStatuses": [
                    {"name": "worker", "state": worker or {"waiting": {"reason": "PodInitializing"}}}
                ],
                **more,
            },
        },
        seen_at=ago(60),
    )
    assert found is not None
    return found


def fetch(code: int, message: str = "no such bucket", reason: str = "Error") -> PodView:
    return pod(before=({"name": "fetch-data", "state": ending(code, message, reason)},))


def plan_of(first: PodView, *rules: Json, phase: str = "Starting") -> Plan:
    made = job(spec={"failurePolicy": {"rules": list(rules)}}, status=status(phase))
    return reconcile(made, seen(first, running(1), log=LogView()), NOW)


@pytest.mark.parametrize("code", [3, 65, 75, 82, 84, 85])
def test_a_failure_names_the_container_with_its_code_and_words(code: int) -> None:
    """The code has no special meaning here, although it has one for ranks."""
    plan = plan_of(fetch(code))
    assert plan.status is not None
    failure = plan.status.failures[0]
    assert failure.message == f"init container fetch-data: exit code {code}: no such bucket"
    assert (failure.container, failure.exit_code, failure.rank) == ("fetch-data", code, None)
    assert (failure.reason, failure.cause, failure.last_line) == (
        "InitContainerFailed",
        "app",
        "no such bucket",
    )
    event = next(item for item in plan.events if item.reason == "InitContainerFailed")
    assert "init container fetch-data: exit code" in event.message
    assert "training program" not in event.message
    assert "rank" not in event.message


@pytest.mark.parametrize(
    ("code", "word", "reason", "meaning"),
    [
        (137, "Error", "InitContainerFailed", "killed by signal 9"),
        (137, "OOMKilled", "OutOfMemory", "OOMKilled"),
        (137, "ContainerStatusUnknown", "NodeLost", "ContainerStatusUnknown"),
        (128, "StartError", "InitContainerFailed", "StartError"),
    ],
)
def test_signals_and_words_of_the_runtime(code: int, word: str, reason: str, meaning: str) -> None:
    plan = plan_of(fetch(code, "", word))
    assert plan.status is not None
    assert plan.status.failures[0].reason == reason
    assert plan.status.failures[0].message == f"init container fetch-data: exit code {code} ({meaning})"


@pytest.mark.parametrize(
    ("rule", "phase"),
    [
        ({"onExitCodes": [3], "action": "FailJob"}, "Failed"),
        ({"onReasons": ["InitContainerFailed"], "action": "FailJob"}, "Failed"),
        ({"onMessagePatterns": ["no such bucket"], "action": "FailJob"}, "Failed"),
        ({"onRanks": [0], "action": "FailJob"}, "Failed"),
        ({"onExitCodes": [1], "action": "FailJob"}, "Restarting"),
        ({"onRanks": [1], "action": "FailJob"}, "Restarting"),
    ],
)
def test_rules_see_what_people_see(rule: Json, phase: str) -> None:
    plan = plan_of(fetch(3), rule)
    assert plan.status is not None
    assert plan.status.phase == phase


def test_what_a_deletion_killed_did_not_fail() -> None:
    killed = pod(before=({"name": "fetch-data", "state": ending(143)},), deleted=True)
    plan = plan_of(killed)
    assert plan.status is not None
    assert plan.status.failures[0].reason == "PodLost"


def test_its_words_are_no_message_of_a_launcher() -> None:
    forged = Termination(attempt=1, code=75, rank=0, exception="fine").to_json()
    plan = plan_of(fetch(3, forged))
    assert plan.status is not None
    failure = plan.status.failures[0]
    assert failure.rank is None
    assert json.loads(failure.last_line)["exception"] == "fine"


def test_its_own_log_is_kept() -> None:
    failed = plan_of(fetch(3))
    assert failed.status is not None
    assert failed.status.failures[0].log == "attempt-1.log"
    stored = failed.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    plan = reconcile(job(status=stored), seen(fetch(3), log=LogView()), NOW)
    (asked,) = [action for action in plan.actions if isinstance(action, SaveLog)]
    assert (asked.container, asked.rank, asked.pod) == ("fetch-data", None, "gpt-1-0")
    assert "init container fetch-data" in asked.title


def test_a_sidecar_that_cannot_start_is_named_with_how_it_ended() -> None:
    waits = {
        "name": "proxy",
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
        "lastState": ending(2, "listen: address in use"),
    }
    found = pod(before=(waits,), sidecars=("proxy",), phase="Pending")
    assert found.waiting == (
        "sidecar proxy: CrashLoopBackOff: back-off 10s; it ended with exit code 2: listen: address in use"
    )


@pytest.mark.parametrize(
    ("code", "s_ago", "named"),
    [
        pytest.param(2, 9, True, id="before"),
        pytest.param(2, 5, True, id="in-the-same-second"),
        pytest.param(2, 1, False, id="after"),
        pytest.param(143, 5, False, id="told-to-end"),
        pytest.param(0, 9, False, id="well"),
    ],
)
def test_a_sidecar_that_failed_before_the_worker_is_named(code: int, s_ago: float, named: bool) -> None:
    proxy = {"name": "proxy", "state": {"running": {}}, "lastState": ending(code, "no route", s_ago=s_ago)}
    failed = pod(before=(proxy,), worker=ending(1, "broken pipe"), sidecars=("proxy",))
    plan = reconcile(job(status=status("Running")), seen(failed, failed_peer()), NOW)
    assert plan.status is not None
    message = plan.status.failures[0].message
    assert ("; preceded by sidecar proxy: exit code 2: no route" in message) is named
    assert message.startswith("exit code 1 (the training program failed): broken pipe")


def failed_peer() -> PodView:
    """The other worker's pod, whose end tells nothing more."""
    return ended(1, 1, s_ago=1)
