"""Table of `reconcile` for the active deadline of a job that is refused between two attempts: it waits for a
user, and no clock runs meanwhile, as in suspended time.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    ALL,
    NOW,
    Row,
    Want,
    ago,
    check,
    ended,
    job,
    ready,
    run,
    seen,
    settled,
    stamp,
    status,
)
from zerotrain.operator.reconcile import CreateWorkers
from zerotrain.operator.reconcile.observe import ClusterApis

pytestmark = pytest.mark.unit


HYBRID = {"config": {"train_micro_batch_size_per_gpu": 1, "hybrid_engine": {"enabled": True}}}
"""Spec that admission rejects."""
SECOND = CreateWorkers(attempt=2, indices=ALL)
NO_GROUPS = ClusterApis(at=ago(1))


def within(seconds: int, **spec: Any) -> dict[str, Any]:
    """Return the spec with this deadline; the clock of `status` has been running for 600 s."""
    return {"runPolicy": {"activeDeadlineSeconds": seconds}, **spec}


ROWS = [
    Row(
        id="refused in time: the clock stops",
        job=job(spec=within(700, **HYBRID), status=status("Restarting")),
        seen=seen(),
        want=Want(phase="Stalled", actions=(), fields={"startTime": None}, wake_in_s=None),
    ),
    Row(
        id="refused too late: the deadline was over before",
        job=job(spec=within(500, **HYBRID), status=status("Restarting")),
        seen=seen(),
        want=Want(phase="Failed", events=("DeadlineExceeded",)),
    ),
    Row(
        id="refused when it is resumed: there is no clock yet",
        job=job(spec=within(1, **HYBRID), status={"phase": "Suspended", "attempt": 1, "podsCreated": True}),
        seen=seen(),
        want=Want(phase="Stalled", fields={"startTime": None}),
    ),
    Row(
        id="it waits longer than the deadline, with a clock that an earlier version left",
        job=job(spec=within(60, **HYBRID), status=status("Stalled")),
        seen=seen(),
        want=Want(phase="Stalled", actions=(), events=(), fields={"startTime": None}),
    ),
    Row(
        id="corrected in the first pass of a newer version: the clock begins with the next pods",
        job=job(spec=within(60), status=status("Stalled")),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, actions=(SECOND,), fields={"startTime": None}),
    ),
    Row(
        id="corrected, and then its pod group is missing: the next attempt's pods start the clock",
        job=job(spec=within(60, scheduling={"gang": "Volcano"}), status=status("Stalled")),
        seen=seen(apis=NO_GROUPS),
        want=Want(phase="Queued", events=("GangMissing",), fields={"startTime": None}),
    ),
    Row(
        id="nor does the wait for the first group count",
        job=job(spec=within(60, scheduling={"gang": "Volcano"}), status={"phase": "Queued", "attempt": 0}),
        seen=seen(apis=NO_GROUPS),
        want=Want(phase="Queued", fields={"startTime": None}),
    ),
    Row(
        id="suspended while it is refused",
        job=job(spec=within(60, suspend=True, **HYBRID), status=status("Stalled")),
        seen=seen(),
        want=Want(phase="Suspended", fields={"startTime": None}),
    ),
    Row(
        id="pods of an earlier attempt that show up late go: no failure, no clock",
        job=job(spec=within(60, **HYBRID), status=status("Stalled")),
        seen=seen(ended(0, 137)),
        want=Want(phase="Stalled", fields={"startTime": None}),
    ),
    *(
        Row(
            id=f"a spec that cannot be read any more, {phase}: the same",
            job=job(spec=within(700, unknownField=1), status=status(phase)),
            seen=seen(),
            want=Want(
                phase=phase, conditions={"Stalled": ("True", "InvalidSpec")}, fields={"startTime": None}
            ),
        )
        for phase in ("Restarting", "Queued", "Stalled")
    ),
    Row(
        id="a spec that cannot be read any more, Running: the ranks work on, and so does the clock",
        job=job(spec=within(700, unknownField=1), status=status("Running")),
        seen=seen(ready(0), ready(1)),
        want=Want(phase="Running", actions=(), fields={"startTime": stamp(ago(600))}),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_the_clock_of_a_stalled_job(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("stalled_s", [1, 59, 3600, 30 * 86_400])
def test_an_attempt_after_a_stall_has_the_whole_deadline(stalled_s: int) -> None:
    """The job is refused between two attempts, corrected after so long, and followed to the deadline of the
    second.
    """
    limit_s = 700
    stalled = settled(job(spec=within(limit_s, **HYBRID), status=status("Restarting")), seen())
    later = NOW + timedelta(seconds=stalled_s)
    stalled = settled(stalled, seen(), later)
    assert stalled["status"]["phase"] == "Stalled"
    corrected = {**stalled, "spec": job(spec=within(limit_s))["spec"]}
    begun = settled(corrected, seen(), later)
    assert (begun["status"]["phase"], begun["status"]["attempt"]) == ("Pending", 2)
    observed = seen(ready(0, 2), ready(1, 2))
    begun = settled(begun, observed, later)
    phases = {}
    for after_s in (5, limit_s - 1, limit_s):
        moment = later + timedelta(seconds=after_s)
        row = Row(id="", job=begun, seen=observed, want=Want(), now=moment)
        phases[after_s] = run(row)[1]["phase"]
    assert phases == {5: "Running", limit_s - 1: "Running", limit_s: "Failed"}
