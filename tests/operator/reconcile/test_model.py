"""Model test of `reconcile` against a small cluster: random failures, deletions, suspends, crashes at every
point.

In all cases no two attempts overlap, no pod name is used twice, no attempt number is skipped, and a cluster
that stays quiet long enough brings every job to its end.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.operator.reconcile_builders import NOW, ended, job, pending, ready
from zerotrain.operator.reconcile import (
    CreateWorkers,
    DeletePods,
    DeleteWorkers,
    Observed,
    Plan,
    PodView,
    Protection,
    ProtectWorkers,
    UnprotectWorkers,
    reconcile,
)
from zerotrain.operator.reconcile.nodes import NodeView

HAPPENINGS = (
    "pass", "pass", "pass", "crash after status", "crash after first action", "operator restarts",
    "pods start", "pods start", "one fails", "one fails for good", "one yields", "all yield", "all succeed",
    "somebody deletes one", "pods go", "pods go", "suspend", "resume", "time passes", "time passes",
    "scale", "cordon", "uncordon",
)  # fmt: skip


ELASTIC = {"minWorkers": 1, "maxWorkers": 2, "shrinkAfterSeconds": 10, "growAfterSeconds": 20}


class World:
    """API server, pods and nodes; one job of one or two workers."""

    def __init__(self) -> None:
        self.job = job(spec={"failurePolicy": {"maxRestarts": 3}, "elastic": ELASTIC})
        self.now = NOW
        self.pods: dict[str, PodView] = {}
        self.gone: list[PodView] = []
        self.synced_at = NOW
        self.names: set[str] = set()
        self.attempts = [0]
        self.forgot = False
        """Whether the operator was restarted since the attempt began."""
        self.budgets: set[int] = set()
        """Attempts that a disruption budget protects."""
        self.protection: Protection | None = None
        self.cordoned: set[str] = set()

    def reconcile(self, *, actions: int = 99) -> Plan:
        """Run one pass; a crash leaves only the first `actions` of its actions done."""
        observed = Observed(
            pods=tuple(self.pods.values()),
            gone=tuple(self.gone),
            synced_at=self.synced_at,
            protection=self.protection,
            nodes={name: NodeView(name=name, unschedulable=True) for name in self.cordoned},
        )
        plan = reconcile(self.job, observed, self.now)
        if plan.status is not None:
            self.store(plan.status.model_dump(mode="json", by_alias=True, exclude_none=True))
        for action in plan.actions[:actions]:
            self.perform(action)
        return plan

    def store(self, status: dict[str, Any]) -> None:
        self.job = {**self.job, "status": status}
        if status["attempt"] != self.attempts[-1]:
            self.attempts.append(status["attempt"])
            self.forgot = False

    def perform(self, action: object) -> None:
        match action:
            case CreateWorkers(attempt=attempt, indices=indices):
                assert attempt == self.job["status"]["attempt"], "pods of an attempt that is not stored"
                assert all(pod.attempt == attempt for pod in self.pods.values()), "two attempts at once"
                for index in indices:
                    self.create(index, attempt)
            case DeleteWorkers(attempt=attempt, grace_s=grace_s):
                for pod in list(self.pods.values()):
                    if pod.attempt == attempt:
                        self.delete(pod, 60 if grace_s is None else grace_s)
            case ProtectWorkers(attempt=attempt):
                assert attempt == self.job["status"]["protectedAttempt"], "a budget that is not stored"
                self.budgets.add(attempt)
                self.protection = Protection(attempt=attempt, exists=True)
            case UnprotectWorkers(attempt=attempt):
                self.budgets.discard(attempt)
                self.protection = Protection(attempt=attempt, exists=False)
            case DeletePods(names_uids=named, grace_s=grace_s):
                for name, uid in named:
                    if name in self.pods and self.pods[name].uid == uid:
                        self.delete(self.pods[name], grace_s)

    def create(self, index: int, attempt: int) -> None:
        pod = pending(index, attempt)
        if pod.name not in self.pods:
            # Once all pods of the attempt were seen, the status records it. Until then an operator that lost
            # its memory cannot tell a pod that a user deleted from one that was never made; no ranks have met
            # yet.
            unknown = self.forgot and not self.job["status"]["podsCreated"]
            assert unknown or pod.name not in self.names, f"the name {pod.name} was used before"
            self.names.add(pod.name)
            self.pods[pod.name] = pod

    def delete(self, pod: PodView, grace_s: int) -> None:
        if grace_s == 0:
            self.remove(pod)
            return
        ends = self.now + timedelta(seconds=grace_s)
        self.pods[pod.name] = replace(
            pod, deletion_at=min(pod.deletion_at or ends, ends), deletion_grace_s=grace_s
        )

    def remove(self, pod: PodView) -> None:
        del self.pods[pod.name]
        self.gone.append(pod)

    def end(self, pod: PodView, code: int) -> None:
        if not pod.ended:
            self.pods[pod.name] = replace(
                ended(pod.index, code, pod.attempt),
                ended_seen_at=self.now,
                deletion_at=pod.deletion_at,
                deletion_grace_s=pod.deletion_grace_s,
            )

    def happen(self, what: str, index: int) -> None:
        chosen = [pod for pod in self.pods.values() if pod.index == index]
        match what:
            case "pass":
                self.reconcile()
            case "crash after status":
                self.reconcile(actions=0)
                self.happen("operator restarts", index)
            case "crash after first action":
                self.reconcile(actions=1)
                self.happen("operator restarts", index)
            case "operator restarts":
                self.gone, self.synced_at, self.forgot = [], self.now, True
                self.protection = None
            case "pods start":
                for pod in list(self.pods.values()):
                    if not pod.ended and pod.deletion_at is None:
                        self.pods[pod.name] = ready(pod.index, pod.attempt)
            case "one fails" | "one fails for good" | "one yields":
                code = {"one fails": 1, "one fails for good": 65, "one yields": 75}[what]
                for pod in chosen:
                    self.end(pod, code)
            case "all yield" | "all succeed":
                for pod in list(self.pods.values()):
                    self.end(pod, 75 if what == "all yield" else 0)
            case "somebody deletes one":
                for pod in chosen:
                    self.delete(pod, 30)
            case "pods go":
                for pod in [pod for pod in self.pods.values() if pod.deletion_at is not None]:
                    self.remove(pod)
            case "suspend" | "resume":
                self.job = {**self.job, "spec": {**self.job["spec"], "suspend": what == "suspend"}}
            case "scale":
                self.job = {**self.job, "spec": {**self.job["spec"], "workers": index + 1}}
            case "cordon":
                self.cordoned.add(f"node-{index}")
            case "uncordon":
                self.cordoned.discard(f"node-{index}")
            case "time passes":
                self.now += timedelta(seconds=7)


histories = st.lists(st.tuples(st.sampled_from(HAPPENINGS), st.integers(0, 1)), max_size=60)


@pytest.mark.unit
@settings(max_examples=8)
@given(histories)
def test_some_orders_of_events_break_no_attempt(history: list[tuple[str, int]]) -> None:
    check(history)


@pytest.mark.ranks
@pytest.mark.slow(
    cheaper="tests/operator/reconcile/test_model.py::test_some_orders_of_events_break_no_attempt"
)
@settings(max_examples=200)
@given(histories)
def test_no_order_of_events_breaks_an_attempt(history: list[tuple[str, int]]) -> None:
    check(history)


def check(history: list[tuple[str, int]]) -> None:
    world = World()
    for what, index in history:
        world.happen(what, index)
    assert world.attempts == list(range(len(world.attempts))), "attempt numbers skip or repeat"
    for _ in range(40):
        world.happen("resume", 0)
        world.reconcile()
        world.happen("pods go", 0)
        world.now += timedelta(seconds=100)
        world.happen("pods start", 0)
        world.reconcile()
        if world.job["status"]["phase"] == "Running":
            world.happen("all succeed", 0)
    assert world.job["status"]["phase"] in ("Completed", "Failed")
    assert world.attempts == list(range(len(world.attempts)))
    assert not world.budgets
    quiet = world.reconcile()
    assert quiet.status is None
    assert not quiet.actions
