"""However wrong the count of room is, or where there is none at all: an elastic job comes to the largest size
that the scheduler places, stays there, and tries for more ever more rarely."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.operator.reconcile_builders import NOW, job, pending, progress, ready
from zerotrain.operator.reconcile import (
    AskRoom,
    CreateWorkers,
    DeleteWorkers,
    Observed,
    PodView,
    ProtectWorkers,
    RequestYield,
    UnprotectWorkers,
    reconcile,
)
from zerotrain.operator.reconcile.claims import Verdict
from zerotrain.operator.reconcile.queues import ClusterApis

SIZES = (1, 2, 4)
"""That keep the global batch of four workers."""
HOURS = 3
GROW_AFTER_S = 300


class Cluster:
    """Nodes for `places` workers, and an operator that is told of room for all, or that nobody can tell."""

    def __init__(self, gang: str, places: int, *, counted: bool) -> None:
        elastic = {"minWorkers": 1, "maxWorkers": 4}
        spec = {"workers": 4, "steps": 10**6, "elastic": elastic, "scheduling": {"gang": gang}}
        self.job = job(spec=spec)
        self.places, self.counted, self.now = places, counted, NOW
        self.pods: dict[str, PodView] = {}
        self.asked: AskRoom | None = None
        self.steps = 0
        self.up_since: datetime | None = None

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.job["status"])

    def look(self) -> None:
        """One pass, and what comes of it."""
        plan = reconcile(self.job, self._observed(), self.now)
        if plan.status is not None:
            stored = plan.status.model_dump(mode="json", by_alias=True, exclude_none=True)
            self.job = {**self.job, "status": stored}
        for action in plan.actions:
            self._perform(action)

    def _observed(self) -> Observed:
        running = self.status.get("phase") == "Running"
        self.steps += running
        known = None
        if running:
            at = self.now.timestamp()
            known = progress(
                self.steps, self.status["attempt"], saved=self.steps, heartbeat_at=at, step_at=at
            )
        return Observed(
            pods=tuple(self.pods.values()),
            synced_at=NOW,
            progress=known,
            apis=ClusterApis(at=NOW),
            capacity=self._word(),
            question=self.asked,
        )

    def _word(self) -> Verdict | None:
        if self.asked is None or self.asked.shape is None:
            return None
        workers, admitted = self.asked.shape.workers, self.counted or not self.asked.growing
        fits = workers if admitted else 0
        return Verdict(admitted=admitted, workers=workers, fits=fits, counted=self.counted, at=self.now)

    def _perform(self, action: object) -> None:
        match action:
            case CreateWorkers(attempt=attempt, indices=indices):
                for index in indices:
                    self._create(pending(index, attempt))
            case DeleteWorkers():
                self.pods = {}
            case RequestYield(attempt=attempt):
                self.pods = {}  # all of them saved and are gone
            case AskRoom():
                self.asked = action if action.shape is not None else None
            case ProtectWorkers() | UnprotectWorkers():
                pass
            case other:
                raise AssertionError(f"unexpected: {other}")

    def _create(self, pod: PodView) -> None:
        if len(self.pods) < self.places:
            pod = replace(pod, scheduled=True, node=f"node-{pod.index}")
        else:
            pod = replace(pod, unscheduled_reason="Unschedulable: volumes", refused_seen_at=self.now)
        self.pods[pod.name] = pod

    def live(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        if self.pods and all(pod.scheduled for pod in self.pods.values()):
            self.pods = {name: ready(pod.index, pod.attempt) for name, pod in self.pods.items()}

    def pass_time(self, seconds: float) -> None:
        end = self.now + timedelta(seconds=seconds)
        while self.now < end:
            self.live(120 if self.status.get("phase") == "Running" else 5)
            self.look()


@pytest.mark.parametrize("counted", [True, False], ids=["counted wrongly", "not counted"])
@pytest.mark.parametrize("places", [1, 3, 4])
@pytest.mark.parametrize("gang", ["None", "Operator"])
def test_the_job_comes_to_the_size_that_the_scheduler_places(gang: str, places: int, counted: bool) -> None:
    cluster = Cluster(gang, places, counted=counted)
    cluster.pass_time(240)
    best = max(size for size in SIZES if size <= places)
    assert cluster.status["phase"] == "Running", cluster.status
    assert cluster.status["shape"]["workers"] == best
    began, ran = cluster.now, 0.0
    while (cluster.now - began).total_seconds() < HOURS * 3600:
        up, before = cluster.status["phase"] == "Running", cluster.now
        cluster.pass_time(1)
        ran += up * (cluster.now - before).total_seconds()
    assert ran > 0.8 * HOURS * 3600
    doublings = math.log2(1 + HOURS * 3600 / GROW_AFTER_S) if counted and best < 4 else 0
    assert cluster.status["attempt"] <= 3 * (1 + doublings), "it tries for more too often"
