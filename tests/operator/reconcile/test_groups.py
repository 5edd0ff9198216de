"""The pod group of an attempt ends with it, however the attempt ends: one row per way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.operator.reconcile_builders import NOW, Row, Want, check, ended, job, ready, seen, stamp, status
from zerotrain.operator.reconcile import CreateWorkers, DeleteWorkers, ForgetGroup

pytestmark = pytest.mark.unit


V1 = "scheduling.volcano.sh/v1beta1"
FORGET = ForgetGroup(attempt=1, gang=V1)
SHAPE = {"workers": 2, "gang": V1}


def at(phase: str, **more: Any) -> dict[str, Any]:
    return status(phase, 1, shape=SHAPE, **more)


DONE = {"completionTime": stamp(NOW)}
KEEP = {"runPolicy": {"cleanPodPolicy": "None"}}
SUSPENDED = {"suspend": True}

ROWS = [
    Row(
        id="a suspended job books no nodes",
        job=job(spec=SUSPENDED, status=at("Suspended")),
        seen=seen(),
        want=Want(actions=(FORGET,), phase="Suspended", wake_in_s=0.05),
    ),
    Row(
        id="what is gone is not asked for again",
        job=job(spec=SUSPENDED, status=at("Suspended")),
        seen=seen(ungrouped=1),
        want=Want(actions=(), phase="Suspended"),
    ),
    Row(
        id="not before its pods are gone",
        job=job(spec=SUSPENDED, status=at("Suspended")),
        seen=seen(ready(0)),
        want=Want(actions=(DeleteWorkers(attempt=1, grace_s=1),)),
    ),
    Row(
        id="a job that completed",
        job=job(status=at("Completed", **DONE)),
        seen=seen(),
        want=Want(actions=(FORGET,), phase="Completed"),
    ),
    Row(
        id="a job that failed and keeps its ended pods",
        job=job(spec=KEEP, status=at("Failed", **DONE)),
        seen=seen(ended(0, 1), ended(1, 1)),
        want=Want(actions=(FORGET,), phase="Failed"),
    ),
    Row(
        id="the next attempt starts after it, and with the API that it had",
        job=job(spec={"scheduling": {"gang": "None"}}, status=at("Restarting")),
        seen=seen(),
        want=Want(actions=(FORGET,), phase="Restarting", attempt=1, wake_in_s=0.05),
    ),
    Row(
        id="then it starts",
        job=job(spec={"scheduling": {"gang": "None"}}, status=at("Restarting")),
        seen=seen(ungrouped=1),
        want=Want(actions=(CreateWorkers(attempt=2, indices=(0, 1)),), attempt=2),
    ),
    Row(
        id="what was deleted of an earlier attempt says nothing of this one",
        job=job(spec=SUSPENDED, status=at("Suspended")),
        seen=seen(ungrouped=0),
        want=Want(actions=(FORGET,)),
    ),
    Row(
        id="an attempt without a gang has none",
        job=job(spec=SUSPENDED, status=at("Suspended") | {"shape": {"workers": 2}}),
        seen=seen(),
        want=Want(actions=()),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_groups(row: Row) -> None:
    check(row)


def test_a_group_that_runs_is_left_alone() -> None:
    row = Row(id="", job=job(status=at("Running")), seen=seen(ready(0), ready(1)), want=Want(phase="Running"))
    check(replace(row, want=Want(actions=())))
