"""Table of stragglers: which rank is named with which node, once, and when the alarm ends."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.operator.reconcile_builders import Row, Want, check, job, progress, ready, seen, status
from zerotrain.contract.progress import Straggler
from zerotrain.operator.reconcile import Observed

pytestmark = pytest.mark.unit


KNOWN = {"attempt": 1, "rank": 1, "pod": "gpt-1-1", "node": "node-1", "percent": 180}


def straggler_report(
    own: float, median: float = 1.0, *, rank: int = 1, attempt: int = 1, step_s: float = 2.0
) -> Observed:
    straggler = Straggler(rank=rank, own_seconds=own, median_seconds=median)
    return seen(ready(0), ready(1), progress=progress(40, attempt, straggler=straggler, step_seconds=step_s))


def row(name: str, observed: Observed, want: Want, *, known: Any = None, **policy: Any) -> Row:
    state = status("Running", straggler=known) if known else status("Running")
    return Row(
        id=name,
        job=job(status=state, spec={"hangPolicy": policy} if policy else {}),
        seen=observed,
        want=want,
    )


NAMED = Want(
    events=("Straggler",),
    fields={"straggler.rank": 1, "straggler.pod": "gpt-1-1", "straggler.node": "node-1"},
    conditions={"Progressing": ("True", "Straggler")},
    messages={"event": "rank 1 (pod gpt-1-1, node node-1) slows down all ranks"},
)
NO_STRAGGLER = Want(events=(), fields={"straggler": None})
KEPT = Want(events=(), fields={"straggler.rank": 1, "straggler.percent": 180})
TAKEN = Want(events=("Straggler",), fields={"straggler.rank": 0, "straggler.percent": 260})
GONE = Want(events=("StragglerRecovered",), fields={"straggler": None})

ROWS = [
    row("half as much again as the middle rank", straggler_report(1.5), NAMED),
    row("a little less is none", straggler_report(1.49), NO_STRAGGLER),
    row("the policy's threshold", straggler_report(1.49), NAMED, stragglerPercent=120),
    row("a higher one", straggler_report(1.9), NO_STRAGGLER, stragglerPercent=200),
    row(
        "what is lost on it is nothing beside the step",
        straggler_report(0.015, 0.005, step_s=2.0),
        NO_STRAGGLER,
    ),
    row("told once", straggler_report(1.8), KEPT, known=KNOWN),
    row("near the threshold it stays", straggler_report(1.3), KEPT, known=KNOWN),
    row("well below the alarm ends", straggler_report(1.2), GONE, known=KNOWN),
    row(
        "another rank of a slow node is the slowest now: no second alarm",
        straggler_report(1.9, rank=0),
        KEPT,
        known=KNOWN,
    ),
    row("unless it is far worse", straggler_report(2.6, rank=0), TAKEN, known=KNOWN),
    row("which the same rank may be", straggler_report(9.0), KEPT, known=KNOWN),
    row("all keep up, whoever is the slowest", straggler_report(1.2, rank=0), GONE, known=KNOWN),
    row("another attempt's record", straggler_report(9.0, attempt=2), NO_STRAGGLER),
    row("a rank that the job does not have", straggler_report(9.0, rank=2), NO_STRAGGLER),
    row("a negative one", straggler_report(9.0, rank=-1), NO_STRAGGLER),
    row("no number", straggler_report(math.nan), NO_STRAGGLER),
    row("an endless one", straggler_report(math.inf), NO_STRAGGLER),
    row("a middle rank that takes no time", straggler_report(1.0, 0.0), NO_STRAGGLER),
    row("a huge ratio is still a number", straggler_report(1e300, 1e-300), NAMED),
]


@pytest.mark.parametrize("item", ROWS, ids=lambda item: item.id)
def test_straggler(item: Row) -> None:
    check(item)
