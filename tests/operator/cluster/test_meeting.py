"""Polls before the rendezvous of the ranks: all workers are polled early, so that the missing ones are
known.
"""

from __future__ import annotations

import pytest

from tests.operator.cluster.test_progress_poller import Bench, Workers
from zerotrain.contract.progress import Phase
from zerotrain.operator.cluster.progress_poller import INSPECTION_INTERVAL_S
from zerotrain.operator.reconcile.hangs import MEETING_S

pytestmark = pytest.mark.unit


BOTH = ["gpt-1-0", "gpt-1-0", "gpt-1-1"]


def waiting(**phases: Phase) -> Workers:
    workers = Workers({"gpt-1-0": 0, "gpt-1-1": 0})
    workers.phases = {f"gpt-1-{name[1:]}": phase for name, phase in phases.items()}
    return workers


async def test_who_has_not_come_is_known_long_before_the_rendezvous_is_given_up() -> None:
    workers = waiting(w0=Phase.RENDEZVOUS, w1=Phase.INIT)
    bench = Bench(workers, phase="Starting")
    workers.idle_s = MEETING_S - 1
    assert await bench.after(0) == ["gpt-1-0"]
    workers.idle_s = MEETING_S
    assert await bench.after(3) == BOTH
    assert bench.slow_rank.rank == 1
    assert bench.slow_rank.why == "it has not joined the rendezvous in which others wait"
    assert await bench.after(3) == ["gpt-1-0"], "not at every question"
    assert await bench.after(INSPECTION_INTERVAL_S) == BOTH


async def test_so_where_rank_0_is_the_one() -> None:
    workers = waiting(w0=Phase.INIT, w1=Phase.RENDEZVOUS)
    workers.idle_s = MEETING_S
    bench = Bench(workers, phase="Starting")
    assert await bench.after(0) == BOTH
    assert bench.slow_rank.rank == 0


async def test_ranks_that_load_together_are_not_slow() -> None:
    workers = waiting(w0=Phase.INIT, w1=Phase.INIT)
    workers.idle_s = MEETING_S
    bench = Bench(workers, phase="Starting")
    assert await bench.after(0) == BOTH
    assert bench.job_state.inspection is None
