"""Table of `reconcile` for specs that must not run: a condition that names the field, and nothing created."""

from __future__ import annotations

import pytest

from tests.operator.reconcile_builders import (
    ALL,
    NOW,
    Row,
    Want,
    check,
    ended,
    job,
    ready,
    seen,
    settled,
    status,
)
from zerotrain.operator.reconcile import CreateWorkers, DeleteWorkers, reconcile

pytestmark = pytest.mark.unit


HYBRID = {"config": {"train_micro_batch_size_per_gpu": 1, "hybrid_engine": {"enabled": True}}}

REFUSED = [
    Row(
        id="a key without behaviour in this version",
        job=job(spec=HYBRID),
        seen=seen(),
        want=Want(
            phase="Stalled",
            attempt=0,
            actions=(),
            events=("NotSupported",),
            conditions={
                "Stalled": ("True", "NotSupported"),
                "Admitted": ("False", "NotSupported"),
                "Ready": ("False", "NotSupported"),
                "Reconciling": ("False", "NotSupported"),
            },
            messages={"Stalled": "spec.config.hybrid_engine"},
        ),
    ),
    Row(
        id="told once",
        job=job(spec=HYBRID, status=status("Stalled", attempt=0)),
        seen=seen(),
        want=Want(phase="Stalled", attempt=0, actions=(), events=()),
    ),
    Row(
        id="corrected: the job starts",
        job=job(status=status("Stalled", attempt=0, podsCreated=False)),
        seen=seen(),
        want=Want(
            phase="Pending",
            attempt=1,
            actions=(CreateWorkers(attempt=1, indices=ALL),),
            conditions={"Stalled": ("False", "SpecAccepted"), "Admitted": ("True", "SpecAccepted")},
        ),
    ),
    Row(
        id="edited into something refused while suspended: no further attempt",
        job=job(spec=HYBRID, status={"phase": "Suspended", "attempt": 3}),
        seen=seen(),
        want=Want(phase="Stalled", attempt=3, actions=()),
    ),
    Row(
        id="and corrected again",
        job=job(status=status("Stalled", attempt=3)),
        seen=seen(),
        want=Want(phase="Pending", attempt=4, actions=(CreateWorkers(attempt=4, indices=ALL),)),
    ),
    Row(
        id="edited while an attempt runs: the attempt goes on, the next one does not start",
        job=job(spec=HYBRID, status=status("Running")),
        seen=seen(ready(0), ready(1)),
        want=Want(phase="Running", actions=()),
    ),
    Row(
        id="the refused job's pods of before still go",
        job=job(spec=HYBRID, status=status("Restarting")),
        seen=seen(ended(0, 137), ready(1)),
        want=Want(phase="Restarting", actions=(DeleteWorkers(attempt=1, grace_s=1),)),
    ),
    Row(
        id="suspended and refused is suspended",
        job=job(spec={**HYBRID, "suspend": True}),
        seen=seen(),
        want=Want(phase="Suspended", actions=()),
    ),
]

UNREADABLE = [
    Row(
        id="a spec that the models do not accept",
        job=job(spec={"workers": "two", "steps": 0}),
        seen=seen(),
        want=Want(
            phase="Stalled",
            actions=(),
            events=("InvalidSpec",),
            conditions={"Stalled": ("True", "InvalidSpec")},
            messages={"Stalled": "spec.workers", "event": "spec.workers"},
        ),
    ),
    Row(
        id="a running job with such a spec keeps its pods",
        job=job(spec={"unknownField": 1}, status=status("Running")),
        seen=seen(ready(0), ready(1)),
        want=Want(
            phase="Running",
            actions=(),
            events=("InvalidSpec",),
            conditions={"Stalled": ("True", "InvalidSpec")},
        ),
    ),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.id)
def test_refused(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", UNREADABLE, ids=lambda row: row.id)
def test_unreadable(row: Row) -> None:
    check(row)
    again = reconcile(settled(row.job, row.seen), row.seen, NOW)
    assert (again.status, again.events) == (None, ())
