"""Table of `reconcile` for elastic jobs whose pods the scheduler refuses: the placed pods determine the
size.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile.test_elastic import (
    changed,
    starting,
)
from tests.operator.reconcile.test_elastic_capacity import OVER_QUOTA
from tests.operator.reconcile_builders import (
    Row,
    Want,
    ago,
    check,
    pending,
    seen,
)
from zerotrain.operator.reconcile import DeleteWorkers, Observed

pytestmark = pytest.mark.unit


NO_NODE = "Unschedulable: 0/4 nodes are available: 1 node(s) had volume node affinity conflict."
STAYS: dict[str, Any] = {"elastic.workers": None, "elastic.losses": 0}


def refused(count: int, size: int, *, s_ago: float, attempt: int = 1, **more: Any) -> Observed:
    """Return an observation in which `count` of the pods have a node, and the scheduler found none for the
    others so long ago.
    """
    said: dict[str, Any] = {"unscheduled_reason": NO_NODE, "refused_seen_at": ago(s_ago)}
    bound = [pending(index, attempt, scheduled=True) for index in range(count)]
    return seen(*bound, *(pending(index, attempt, **said) for index in range(count, size)), **more)


def of_eight(s_ago: float) -> dict[str, Any]:
    return changed(starting(8, s_ago=s_ago, requested_workers=8, base=8), shape={"workers": 8})


EACH_POD_ALONE = [
    Row(
        id="the scheduler has no node for some: on with those that it placed",
        job=starting(4, s_ago=120),
        seen=refused(3, 4, s_ago=118),
        want=Want(
            phase="Yielding",
            events=("Resizing",),
            actions=(DeleteWorkers(attempt=1, grace_s=1),),
            fields={
                "elastic.workers": 2,
                "elastic.losses": 1,
                "elastic.message": "capacity for 3 of 4 workers",
            },
            messages={"event": "no capacity for 4 workers within 120 s: continuing with 2"},
        ),
    ),
    Row(
        id="three of eight placed: the largest size that works with three",
        job=of_eight(9000),
        seen=refused(3, 8, s_ago=8990),
        want=Want(phase="Yielding", fields={"elastic.workers": 2}),
    ),
    Row(
        id="the scheduler said no a moment ago: it looks again when others go",
        job=starting(4, s_ago=500),
        seen=refused(3, 4, s_ago=4),
        want=Want(phase="Pending", events=(), fields=STAYS, wake_in_s=6),
    ),
    Row(
        id="shrinkAfterSeconds are given in any case",
        job=starting(4, s_ago=110),
        seen=refused(3, 4, s_ago=108),
        want=Want(phase="Pending", events=(), fields=STAYS, wake_in_s=10),
    ),
    Row(
        id="a place that the scheduler makes free by preemption is one",
        job=of_eight(9000),
        seen=seen(
            *refused(3, 7, s_ago=8990).pods,
            pending(7, unscheduled_reason=NO_NODE),
        ),
        want=Want(phase="Yielding", fields={"elastic.workers": 4}),
    ),
    Row(
        id="no pod was placed, as of a gang: sizes are tried one by one",
        job=starting(4, s_ago=9000),
        seen=refused(0, 4, s_ago=8990),
        want=Want(phase="Yielding", fields={"elastic.workers": 2}),
    ),
    Row(
        id="pods that a quota keeps out have no place beside those that the scheduler refuses",
        job=changed(starting(4, s_ago=9000), podsCreated=False),
        seen=refused(1, 2, s_ago=8990, problem=OVER_QUOTA),
        want=Want(phase="Yielding", fields={"elastic.workers": 1}),
    ),
    Row(
        id="pods that are being made wait for the others and not for nodes",
        job=changed(of_eight(9000), podsCreated=False),
        seen=refused(3, 4, s_ago=8990, creating=True),
        want=Want(phase="Pending"),
    ),
    Row(
        id="pods that a webhook keeps from being made are not refused by the scheduler",
        job=changed(of_eight(9000), podsCreated=False),
        seen=refused(3, 4, s_ago=8990),
        want=Want(
            phase="Yielding",
            fields={"elastic.workers": 4, "elastic.message": "capacity for 7 of 8 workers"},
        ),
    ),
]


NOT_LOOKED_AT = [
    Row(
        id="pods that the scheduler has not looked at, or makes room for, are no lack of room",
        job=starting(4, s_ago=9000),
        seen=seen(*(pending(index) for index in range(4))),
        want=Want(phase="Pending", events=(), fields=STAYS),
    ),
    Row(
        id="nor are they beside some that it placed",
        job=of_eight(9000),
        seen=seen(*(pending(index, scheduled=index < 3) for index in range(8))),
        want=Want(phase="Pending", events=(), fields=STAYS),
    ),
    Row(
        id="pods that a webhook keeps from being made, beside others that no scheduler looks at",
        job=changed(starting(4, s_ago=9000), podsCreated=False),
        seen=seen(*(pending(index) for index in range(3))),
        want=Want(phase="Pending", events=(), fields=STAYS),
    ),
]


@pytest.mark.parametrize("row", [*EACH_POD_ALONE, *NOT_LOOKED_AT], ids=lambda row: row.id)
def test_the_scheduler_decides_how_large_the_job_is(row: Row) -> None:
    check(row)
