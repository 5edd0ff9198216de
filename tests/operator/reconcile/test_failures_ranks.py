"""Table of `reconcile` for the ranks of a failed attempt: each that failed is recorded, whatever pod it ran
in.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import Row, Want, check, ended, job, last_words, ready, seen, status
from zerotrain.contract.progress import RankEnd
from zerotrain.operator.reconcile import PodView

pytestmark = pytest.mark.unit


def failed(
    index: int, code: int, rank: int | None, *others: RankEnd, s_ago: float = 5, **more: Any
) -> PodView:
    """Return a pod whose launcher names these ranks; `rank` failed first."""
    words = last_words(code, rank=rank, also_failed=others, exception=more.pop("exception", None))
    return ended(index, code, s_ago=s_ago, termination=words, **more)


def each(*pods: PodView, id: str, want: dict[str, Any], ranks: int = 4) -> Row:
    """Row of two workers of so many ranks."""
    body = job(spec={"ranksPerWorker": ranks}, status=status("Running"))
    return Row(id=id, job=body, seen=seen(*pods), want=Want(fields=want))


ROWS = [
    each(
        failed(
            0,
            67,
            2,
            RankEnd(rank=0, code=1, reason="RuntimeError: lost its peer"),
            RankEnd(rank=3, code=139),
            exception="NonFiniteLoss: at step 3",
        ),
        ready(1),
        id="all ranks of one pod, the cause first",
        want={
            "failures.0.rank": 2,
            "failures.0.ranks.0.rank": 2,
            "failures.0.ranks.0.exitCode": 67,
            "failures.0.ranks.0.reason": "PermanentFailure",
            "failures.0.ranks.1": {
                "rank": 0,
                "pod": "gpt-1-0",
                "node": "node-0",
                "exitCode": 1,
                "reason": "RankFailed",
                "message": "exit code 1 (the training program failed): RuntimeError: lost its peer",
            },
            "failures.0.ranks.2.rank": 3,
            "failures.0.ranks.2.exitCode": 139,
            "failures.0.ranks.2.reason": "Killed",
            "failures.0.ranks.2.message": "exit code 139 (killed by signal 11)",
            "failures.0.ranks.3": None,
        },
    ),
    each(
        failed(0, 1, 1, RankEnd(rank=0, code=1), s_ago=3),
        failed(1, 1, 6, RankEnd(rank=7, code=1), s_ago=5),
        id="the first of each worker before their other ranks",
        want={f"failures.0.ranks.{place}.rank": rank for place, rank in enumerate((6, 1, 7, 0))},
    ),
    each(
        failed(0, 1, 1, *(RankEnd(rank=rank, code=1) for rank in range(64) if rank != 1)),
        ready(1),
        ranks=64,
        id="sixteen at most",
        want={"failures.0.ranks.15.rank": 15, "failures.0.ranks.16": None},
    ),
    each(
        failed(1, 1, 5, *(RankEnd(rank=rank, code=1) for rank in (-1, 0, 3, 5, 6, 6, 8, 2**40))),
        ready(0),
        id="a worker speaks for its own ranks, and of each once",
        want={"failures.0.ranks.0.rank": 5, "failures.0.ranks.1.rank": 6, "failures.0.ranks.2": None},
    ),
    each(
        failed(0, 1, 1, RankEnd(rank=0, code=0), RankEnd(rank=2, code=75), RankEnd(rank=3, code=-7)),
        ready(1),
        id="what is no code of a failure is none",
        want={"failures.0.ranks.0.rank": 1, "failures.0.ranks.1": None},
    ),
    each(
        failed(0, 137, 1, RankEnd(rank=2, code=1), RankEnd(rank=3, code=137), exit_reason="OOMKilled"),
        ready(1),
        id="the container's word is about those that were killed",
        want={
            "failures.0.ranks.0.reason": "OutOfMemory",
            "failures.0.ranks.1.reason": "RankFailed",
            "failures.0.ranks.2.reason": "OutOfMemory",
        },
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_every_failed_rank_is_on_record(row: Row) -> None:
    check(row)
