"""Table of `reconcile` for elastic jobs whose requested size is rejected, at once or with a later
configuration: the size kept in its place outlasts lost capacity, a failure rule and a suspension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.operator.reconcile.test_elastic import (
    ELASTIC,
    capacity,
    changed,
    elastic,
    placed,
    starting,
    team,
)
from tests.operator.reconcile.test_elastic_capacity import HUGE
from tests.operator.reconcile_builders import NOW, Row, Want, ago, check, ended, run, seen, settled, stamp
from zerotrain.operator.reconcile import UnprotectWorkers

pytestmark = pytest.mark.unit


WHY = "3 workers x 1 ranks: train_batch_size: must be a multiple of 3 ranks = 3"
REFUSAL = {"workers": 4, "message": WHY}
REFUSED_SIZE = {"Admitted": ("True", "ResizeRefused")}
KEPT = {"elastic.workers": 4, "elastic.reason": "Refused", "elastic.message": WHY, "elastic.refused": None}
"""Fields of a job that requests 3 workers and keeps the 4 that its batch is meant for."""


def batch(samples: int, micro: int = 2) -> dict[str, Any]:
    sizes = {"train_batch_size": samples, "train_micro_batch_size_per_gpu": micro}
    return {"config": {"zero_optimization": {"stage": 3}, **sizes}}


def refused(size: int, **state: Any) -> dict[str, Any]:
    """Return a job that runs with `size` of the 4 workers that it keeps."""
    if size == 4:
        return elastic(4, requested_workers=3, workers=4, reason="Refused", message=WHY, **state)
    return elastic(size, requested_workers=3, refused=REFUSAL, **state)


def resumed(size: int, spec: Mapping[str, Any], *, requested_workers: int, **state: Any) -> dict[str, Any]:
    """Return a suspended job with the present values of its spec."""
    return changed(
        elastic(size, requested_workers=requested_workers, **state),
        {"workers": requested_workers, **spec},
        phase="Suspended",
    )


CHECKED_AGAIN = [
    Row(
        id="resumed with a batch that the size taken before does not divide: refused, with the numbers",
        job=resumed(3, batch(16), requested_workers=3),
        seen=seen(),
        want=Want(
            phase="Pending",
            attempt=2,
            events=("Resumed", "ResizeRefused"),
            conditions=REFUSED_SIZE,
            fields={
                "shape.workers": 2,
                "elastic.workers": 2,
                "elastic.reason": "Refused",
                "elastic.requestedWorkers": 3,
            },
            messages={
                "event": "got 16. Numbers of ranks that divide it are 1, 2, 4, 8. The job keeps 2 workers.",
                "Admitted": "The job keeps 2 workers.",
            },
        ),
    ),
    Row(
        id="resumed with a batch that it divides: the size stays",
        job=resumed(3, batch(48), requested_workers=3),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, events=("Resumed",), fields={"shape.workers": 3}),
    ),
    Row(
        id="no smaller size works: the job stalls with the numbers and both ways out",
        job=resumed(3, {**batch(16), "elastic": {"minWorkers": 3, "maxWorkers": 8}}, requested_workers=3),
        seen=seen(),
        want=Want(
            phase="Stalled",
            attempt=1,
            actions=(UnprotectWorkers(attempt=1),),
            conditions={"Stalled": ("True", "InvalidSpec")},
            messages={
                "Stalled": "Numbers of ranks that divide it are 1, 2, 4, 8. No number of workers "
                "from elastic.minWorkers 3"
            },
        ),
    ),
    Row(
        id="and goes on once it is scaled to one that works",
        job=changed(
            resumed(3, {**batch(16), "elastic": {"minWorkers": 3, "maxWorkers": 8}}, requested_workers=3),
            {"workers": 4},
            phase="Stalled",
        ),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, fields={"shape.workers": 4, "elastic.reason": None}),
    ),
    Row(
        id="given between two passes that saw no suspension: judged all the same",
        job=changed(resumed(3, batch(16), requested_workers=3), phase="Restarting"),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, events=("ResizeRefused",), fields={"shape.workers": 2}),
    ),
    Row(
        id="a size that the operator chose does not divide any more: back to the wish",
        job=changed(resumed(3, batch(16), requested_workers=8, base=8), phase="Restarting"),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, fields={"shape.workers": 8, "elastic.reason": None}),
    ),
    Row(
        id="nor does what was kept in the place of a refused wish: the next smaller that does",
        job=resumed(6, batch(20, 1), requested_workers=3, reason="Refused", message=WHY),
        seen=seen(),
        want=Want(
            phase="Pending",
            attempt=2,
            conditions=REFUSED_SIZE,
            fields={"shape.workers": 5, "elastic.workers": 5, "elastic.reason": "Refused"},
            messages={"Admitted": "got 20."},
        ),
    ),
    Row(
        id="with what was kept it is wrong, with the wish it is right: the wish is taken, unasked",
        job=changed(
            resumed(8, batch(12, 1), requested_workers=3, reason="Refused", message=WHY),
            phase="Restarting",
            nextAttemptTime=None,
        ),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, fields={"shape.workers": 3, "elastic.reason": None}),
    ),
    Row(
        id="a configuration that is wrong for every size is the spec's fault, and no size's",
        job=resumed(3, {"config": {"nonsense": 1}}, requested_workers=3),
        seen=seen(),
        want=Want(phase="Stalled", messages={"Stalled": "nonsense"}, fields={"elastic.reason": None}),
    ),
]

RULE = {"failurePolicy": {"rules": [{"onReasons": ["RankFailed"], "action": "ShrinkAndRestart"}]}}
SET_ASIDE = {
    "elastic.workers": 2,
    "elastic.refused.workers": 4,
    "elastic.refused.message": WHY,
    "elastic.losses": 1,
}
STANDS = [
    Row(
        id="room is lost under a refused wish: it goes on smaller, and the refusal stands",
        job=changed(
            starting(4, s_ago=120, requested_workers=3, workers=4, reason="Refused", message=WHY),
            shape={"workers": 4},
        ),
        seen=placed(3, 4, capacity=capacity(3, asked=4)),
        want=Want(
            phase="Yielding",
            conditions=REFUSED_SIZE,
            fields={
                **SET_ASIDE,
                "elastic.reason": "Capacity",
                "elastic.message": "capacity for 3 of 4 workers",
            },
            messages={"Admitted": f"{WHY} The job keeps 4 workers."},
        ),
    ),
    Row(
        id="so it does where a rule makes the job smaller",
        job=changed(refused(4), RULE),
        seen=seen(*(ended(index, 1) for index in range(4))),
        want=Want(
            phase="Restarting", conditions=REFUSED_SIZE, fields={**SET_ASIDE, "elastic.reason": "Failure"}
        ),
    ),
    Row(
        id="smaller still: it is kept all the same",
        job=changed(starting(2, s_ago=120, requested_workers=3, refused=REFUSAL), shape={"workers": 2}),
        seen=placed(1, 2, capacity=capacity(1, asked=2)),
        want=Want(phase="Yielding", fields={"elastic.workers": 1, "elastic.refused.workers": 4}),
    ),
    Row(
        id="room again: back to what the job keeps, and not only up to the wish",
        job=refused(2, losses=1),
        seen=team(2, capacity=capacity(4, asked=4)),
        want=Want(
            phase="Yielding",
            events=("Resizing",),
            conditions=REFUSED_SIZE,
            fields=KEPT,
        ),
    ),
    Row(
        id="back at what it keeps: earlier losses are forgotten",
        job=refused(4, losses=2),
        seen=team(4),
        want=Want(phase="Running", events=(), conditions=REFUSED_SIZE, fields={"elastic.losses": 0}),
    ),
    Row(
        id="resumed: what it keeps is tried again, and not the wish",
        job=changed(refused(2), phase="Suspended"),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, conditions=REFUSED_SIZE, fields={**KEPT, "shape.workers": 4}),
    ),
    Row(
        id="resumed after a rule made it smaller: the same",
        job=changed(refused(2, reason="Failure"), phase="Suspended"),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, fields={**KEPT, "shape.workers": 4}),
    ),
    Row(
        id="resumed with a status that an earlier version wrote, which forgot the refusal",
        job=changed(elastic(2, requested_workers=3), phase="Suspended"),
        seen=seen(),
        want=Want(
            phase="Pending", attempt=2, events=("Resumed", "ResizeRefused"), fields={"shape.workers": 2}
        ),
    ),
    Row(
        id="resumed with a configuration that takes the wish: it is taken",
        job=changed(refused(2), batch(24), phase="Suspended"),
        seen=seen(),
        want=Want(
            phase="Pending",
            attempt=2,
            conditions={"Admitted": ("True", "SpecAccepted")},
            fields={"shape.workers": 3, "elastic.reason": None, "elastic.refused": None},
        ),
    ),
    Row(
        id="a size that the operator chose and that does not fit the memory: back to what it keeps",
        job=changed(
            elastic(4, base=8, requested_workers=3, refused={"workers": 8, "message": WHY}),
            HUGE,
            phase="Restarting",
        ),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, fields={"shape.workers": 8, "elastic.reason": "Refused"}),
    ),
    Row(
        id="bounds that the smaller size is out of: back to what it keeps",
        job=changed(refused(2), {"elastic": {"minWorkers": 3, "maxWorkers": 8}}, phase="Restarting"),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, events=(), fields={**KEPT, "shape.workers": 4}),
    ),
    Row(
        id="no growth above maxWorkers, though more was kept",
        job=changed(refused(2), {"elastic": {**ELASTIC, "maxWorkers": 3}}),
        seen=team(2, capacity=capacity(4, asked=4)),
        want=Want(
            phase="Running",
            events=(),
            actions=(),
            fields={"elastic.workers": 2, "elastic.reason": "Refused"},
        ),
    ),
    Row(
        id="another wish lifts it",
        job=changed(refused(2), {"workers": 2}),
        seen=team(2),
        want=Want(phase="Running", conditions={"Admitted": ("True", "SpecAccepted")}),
    ),
]

ALL_OF_4 = capacity(4, asked=4)
WITHIN_THE_WINDOW = [
    Row(
        id="room lost after a rule made it smaller does not lift what the rule promised",
        job=elastic(1, failedAt=stamp(ago(3000)), losses=2),
        seen=team(1, capacity=ALL_OF_4),
        want=Want(phase="Running", actions=(), wake_in_s=600),
    ),
    Row(
        id="the window is over: it grows, and the promise with it",
        job=elastic(1, failedAt=stamp(ago(3600)), losses=2),
        seen=team(1, capacity=ALL_OF_4),
        want=Want(phase="Yielding", events=("Resizing",), fields={"elastic.failedAt": None}),
    ),
    Row(
        id="after a suspension it begins with its wish, and nothing is promised",
        job=changed(elastic(1, failedAt=stamp(ago(60))), phase="Suspended"),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, fields={"shape.workers": 4, "elastic.failedAt": None}),
    ),
    Row(
        id="room is lost in the size that a rule chose: since when is kept",
        job=changed(starting(2, s_ago=120, reason="Failure", since=stamp(ago(130))), shape={"workers": 2}),
        seen=placed(1, 2, capacity=capacity(1, asked=2)),
        want=Want(
            phase="Yielding",
            fields={"elastic.workers": 1, "elastic.reason": "Capacity", "elastic.failedAt": stamp(ago(130))},
        ),
    ),
    Row(
        id="a rule makes it smaller: since now",
        job=changed(elastic(4), RULE),
        seen=seen(*(ended(index, 1) for index in range(4))),
        want=Want(phase="Restarting", fields={"elastic.failedAt": stamp(NOW), "elastic.reason": "Failure"}),
    ),
]


@pytest.mark.parametrize("row", CHECKED_AGAIN, ids=lambda row: row.id)
def test_a_size_is_checked_with_the_configuration_that_it_starts_with(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", STANDS, ids=lambda row: row.id)
def test_a_refusal_lasts_while_the_request_does(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", WITHIN_THE_WINDOW, ids=lambda row: row.id)
def test_a_size_that_failed_is_not_grown_back_to_within_the_window(row: Row) -> None:
    check(row)


def test_what_was_decided_is_not_written_again() -> None:
    for row in (*CHECKED_AGAIN, *STANDS, *WITHIN_THE_WINDOW):
        again = settled(settled(row.job, row.seen), row.seen)
        plan, _ = run(replace(row, job=again))
        assert plan.status is None, row.id


def test_a_rule_finds_no_size_where_the_configuration_is_wrong_for_every_one() -> None:
    """The configuration was given under a suspension that no pass saw, before the job's ranks failed."""
    body = changed(elastic(4), {**RULE, "config": {"nonsense": 1}})
    plan, after = run(Row(id="", job=body, seen=seen(*(ended(index, 1) for index in range(4))), want=Want()))
    assert after["phase"] == "Restarting"
    assert "the number of workers stays" in plan.events[0].message
