"""A start that hangs and a pod that does not go are reported with the cause, once, and in conditions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.operator.reconcile_builders import NOW, ago, ended, job, running, seen, stamp, status
from zerotrain.operator.reconcile import DeletePods, Plan, PodView, pod_view, reconcile

pytestmark = pytest.mark.unit

Json = dict[str, Any]
VOLUMES: list[Json] = [
    {
        "name": "zerotrain-job",
        "projected": {
            "sources": [{"secret": {"name": "gpt-1"}}, {"configMap": {"name": "ds", "items": []}}],
        },
    },
    {"name": "tmp", "emptyDir": {}},
    {"name": "keys", "secret": {"secretName": "hub-token"}},
    {"name": "maybe", "configMap": {"name": "not-needed", "optional": True}},
    {"name": "data", "persistentVolumeClaim": {"claimName": "corpus"}},
]
NEEDS = "Secret gpt-1, ConfigMap ds, Secret hub-token, claim corpus"


def starting(
    s_ago: float,
    *,
    sandbox: str | None = "False",
    before: list[Json] | None = None,
    waiting: str = "ContainerCreating",
    message: str = "",
) -> PodView:
    """Return worker 0, which got its node so many seconds ago."""
    labels = {"zerotrain.dev/job": "gpt", "zerotrain.dev/attempt": "1", "zerotrain.dev/rank": "0"}
    bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(ago(s_ago))}
    ready = {"type": "PodReadyToStartContainers", "status": sandbox}
    found = pod_view(
        {
            "metadata": {"name": "gpt-1-0", "uid": "pod-1-0", "labels": labels},
            "spec": {"nodeName": "node-0", "volumes": VOLUMES},
            "status": {
                "phase": "Pending",
                "conditions": [bound, *([ready] if sandbox else [])],
                "initContainerStatuses": before or [],
                "containerStatuses": [
                    {"name": "worker", "state": {"waiting": {"reason": waiting, "message": message}}}
                ],
            },
        },
        seen_at=ago(s_ago),
    )
    assert found is not None
    return found


def passed(first: PodView, *, conditions: list[Json] | None = None) -> Plan:
    made = job(status=status("Pending", conditions=conditions or []))
    return reconcile(made, seen(first, running(1)), NOW)


def ready(plan: Plan) -> tuple[str, str]:
    assert plan.status is not None
    found = next(item for item in plan.status.conditions if item.type == "Ready")
    return found.reason, found.message


def messages_of(plan: Plan, reason: str) -> list[str]:
    return [event.message for event in plan.events if event.reason == reason]


def test_volumes_that_are_not_set_up_are_named() -> None:
    plan = passed(starting(31))
    since = (
        f"since {ago(31):%H:%M:%S} UTC the kubelet of node node-0 has not set up its volumes or its network"
    )
    message = f"worker 0 (pod gpt-1-0): {since}; it needs {NEEDS}: does each exist in the namespace?"
    assert ready(plan) == ("PodNotStarting", message)
    assert messages_of(plan, "PodNotStarting") == [f"attempt 1: {message}"]


def test_nothing_is_reported_before_and_a_pass_comes_when_it_is() -> None:
    plan = passed(starting(20))
    assert ready(plan)[0] == "WaitingForPods"
    assert not messages_of(plan, "PodNotStarting")
    assert plan.wake_at is not None
    assert (plan.wake_at - NOW).total_seconds() == 10


@pytest.mark.parametrize(("s_ago", "reason"), [(60, "WaitingForPods"), (301, "PodNotStarting")])
def test_a_pull_may_take_minutes(s_ago: float, reason: str) -> None:
    assert ready(passed(starting(s_ago, sandbox="True")))[0] == reason


FETCHING: Json = {"name": "fetch-data", "state": {"running": {}}}


def fetching(s_ago: float, conditions: list[Json] | None = None) -> Plan:
    first = starting(s_ago, sandbox="True", before=[FETCHING], waiting="PodInitializing")
    return passed(first, conditions=conditions)


def test_an_init_container_may_run_for_minutes_and_is_named() -> None:
    plan = fetching(240)
    assert ready(plan) == (
        "WaitingForPods",
        "1 pods have not started; worker 0 (pod gpt-1-0): init container fetch-data runs",
    )
    assert not plan.events
    assert plan.wake_at is not None
    assert (plan.wake_at - NOW).total_seconds() == 60


def test_one_that_runs_for_longer_may_wait_for_packets_that_the_policy_drops() -> None:
    """The container gives no sign and may be at work, so there is no warning, and it goes on."""
    plan = fetching(301)
    reason, message = ready(plan)
    assert reason == "InitContainerRuns"
    assert "worker 0 (pod gpt-1-0): init container fetch-data runs" in message
    assert "the job's NetworkPolicy" in message
    assert "spec.network.egressCidrs" in message
    assert "zerotrain.dev/job=gpt" in message
    assert messages_of(plan, reason) == [f"attempt 1: {message}"]
    assert [str(event.type) for event in plan.events] == ["Normal"]
    assert plan.actions == ()
    before = {**REPORTED_BEFORE, "reason": reason}
    assert not messages_of(fetching(301, [before]), reason), "once"


def test_a_silent_kubelet_is_not_blamed() -> None:
    assert ready(passed(starting(3600, sandbox=None)))[0] == "WaitingForPods"


REPORTED_BEFORE: Json = {
    "type": "Reconciling", "status": "True", "reason": "PodNotStarting", "message": "",
    "lastTransitionTime": stamp(ago(60)),
}  # fmt: skip


def test_it_is_reported_once() -> None:
    assert not messages_of(passed(starting(120), conditions=[REPORTED_BEFORE]), "PodNotStarting")


def test_a_container_that_cannot_start_makes_an_event() -> None:
    plan = passed(starting(5, sandbox="True", waiting="ImagePullBackOff", message="no such image"))
    assert ready(plan)[0] == "ContainerWaiting"
    assert messages_of(plan, "ContainerWaiting") == [
        "attempt 1: worker 0 (pod gpt-1-0): ImagePullBackOff: no such image"
    ]


def deleted(index: int, *, s_ago: float, over: bool) -> PodView:
    """Return a pod whose grace period ended so many seconds ago."""
    gone: Json = {"deletion_at": ago(s_ago), "deletion_grace_s": 1, "finalizers": ("example.com/audit",)}
    return ended(index, 1, **gone) if over else running(index, **gone)


def restarting(*pods: PodView) -> Plan:
    failure = {"attempt": 1, "time": stamp(ago(300)), "pod": "gpt-1-1", "reason": "RankFailed"}
    return reconcile(job(status=status("Restarting", failures=[failure])), seen(*pods), NOW)


@pytest.mark.parametrize(
    ("s_ago", "over", "named"),
    [
        pytest.param(1, True, True, id="all-in-it-has-ended"),
        pytest.param(1, False, False, id="it-still-ends"),
        pytest.param(3600, False, True, id="its-time-is-over"),
    ],
)
def test_a_finalizer_is_named_once_it_is_all_that_is_left(s_ago: float, over: bool, named: bool) -> None:
    plan = restarting(deleted(0, s_ago=s_ago, over=over))
    reason, message = ready(plan)
    assert (reason == "PodHeld") is named
    assert ("pod gpt-1-0 cannot be removed: finalizer example.com/audit holds it" in message) is named
    assert len(messages_of(plan, "PodHeld")) == named


@pytest.mark.parametrize("grace_s", [1, 0])
def test_a_pod_that_a_finalizer_keeps_is_deleted_by_force_once(grace_s: int) -> None:
    """The passes of a job of a thousand such pods would use up what the operator may ask for all jobs."""
    plan = restarting(replace(deleted(0, s_ago=3600, over=False), deletion_grace_s=grace_s))
    forced = (DeletePods(names_uids=(("gpt-1-0", "pod-1-0"),), grace_s=0),)
    assert plan.actions == (forced if grace_s else ())
    assert ready(plan)[0] == "PodHeld"


def test_finalizers_count_for_pods_that_are_to_go() -> None:
    meta = {
        "name": "gpt-1-0", "uid": "u", "finalizers": ["example.com/audit"],
        "labels": {"zerotrain.dev/job": "gpt", "zerotrain.dev/attempt": "1", "zerotrain.dev/rank": "0"},
    }  # fmt: skip
    kept = pod_view({"metadata": meta, "spec": {}, "status": {}}, seen_at=NOW)
    going = pod_view({"metadata": {**meta, "deletionTimestamp": stamp(NOW)}, "spec": {}}, seen_at=NOW)
    assert kept is not None
    assert going is not None
    assert (kept.finalizers, going.finalizers) == ((), ("example.com/audit",))
