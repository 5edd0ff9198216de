"""Table of `reconcile` for elastic jobs whose bounds are edited while they keep a size because the requested
one was rejected.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.operator.reconcile.test_elastic import ELASTIC, changed, elastic, team
from tests.operator.reconcile.test_elastic_kept import REFUSED_SIZE, batch
from tests.operator.reconcile_builders import Row, Want, check, run, seen, settled

pytestmark = pytest.mark.unit


OF_SIX = {"reason": "Refused", "message": "6 workers x 1 ranks: train_batch_size"}


def bounded(
    size: int, lowest: int, highest: int, *, phase: str = "Restarting", **state: Any
) -> dict[str, Any]:
    """Return a job of 8 workers with a batch of 16 that keeps `size` workers because its request for 6 was
    rejected; its bounds are now these.
    """
    bounds = {**ELASTIC, "minWorkers": lowest, "maxWorkers": highest}
    body = elastic(size, requested_workers=6, base=8, **{**OF_SIX, "workers": size, **state})
    return changed(body, {"workers": 6, **batch(16, 1), "elastic": bounds}, phase=phase)


BOUNDS = [
    Row(
        id="above what it may have by now: the largest below it that works",
        job=bounded(8, 1, 6),
        seen=seen(),
        want=Want(
            phase="Pending",
            events=("ResizeRefused",),
            conditions=REFUSED_SIZE,
            fields={"shape.workers": 4, "elastic.workers": 4, "elastic.reason": "Refused"},
            messages={"event": "The job keeps 4 workers."},
        ),
    ),
    Row(
        id="within them it stays, and nobody is told anew",
        job=bounded(4, 1, 6),
        seen=seen(),
        want=Want(phase="Pending", events=(), fields={"shape.workers": 4}),
    ),
    Row(
        id="one that runs is made smaller",
        job=bounded(8, 1, 6, phase="Running"),
        seen=team(8),
        want=Want(phase="Yielding", events=("ResizeRefused", "Resizing"), fields={"elastic.workers": 4}),
    ),
    Row(
        id="below: nothing between it and the wish works, and no attempt is begun outside the bounds",
        job=bounded(4, 5, 8),
        seen=seen(),
        want=Want(
            phase="Stalled",
            conditions={"Stalled": ("True", "InvalidSpec")},
            messages={
                "Stalled": "The 4 workers that were kept in their place are outside spec.elastic. No number "
                "of workers from elastic.minWorkers 5 to 5"
            },
        ),
    ),
    Row(
        id="and one that runs so is not stopped for that",
        job=bounded(4, 5, 8, phase="Running"),
        seen=team(4),
        want=Want(phase="Running", events=()),
    ),
    Row(
        id="a wish that is refused together with new bounds keeps a size within them at once",
        job=changed(
            elastic(8, requested_workers=8, base=8),
            {"workers": 6, **batch(16, 1), "elastic": {**ELASTIC, "minWorkers": 1, "maxWorkers": 6}},
        ),
        seen=team(8),
        want=Want(
            phase="Yielding",
            fields={"elastic.workers": 4, "elastic.reason": "Refused"},
            messages={"event": "The job keeps 4 workers."},
        ),
    ),
    Row(
        id="while room is short the refusal behind it follows the bounds as well",
        job=bounded(
            2,
            1,
            6,
            workers=2,
            reason="Capacity",
            message="capacity for 2 of 8 workers",
            refused={"workers": 8, "message": "6 workers x 1 ranks: train_batch_size"},
        ),
        seen=seen(),
        want=Want(
            phase="Pending",
            events=(),
            fields={"shape.workers": 2, "elastic.refused.workers": 4, "elastic.reason": "Capacity"},
        ),
    ),
]


@pytest.mark.parametrize("row", BOUNDS, ids=lambda row: row.id)
def test_a_size_that_is_kept_follows_the_bounds(row: Row) -> None:
    check(row)


def test_what_was_decided_is_not_written_again() -> None:
    for row in BOUNDS:
        again = settled(settled(row.job, row.seen), row.seen)
        plan, _ = run(replace(row, job=again))
        assert plan.status is None, row.id
