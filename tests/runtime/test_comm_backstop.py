"""How long ranks wait for each other is the operator's to say where it looks after hangs. Ranks that can
never meet are told as soon as without it."""

from __future__ import annotations

import os
import queue
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ports import free_port
from tests.support.ranks import run_ranks
from zerotrain.contract.launch import CommEnv, LaunchSpec, RankEnv
from zerotrain.runtime.comm import watchdog
from zerotrain.runtime.comm.group import DEFAULT_TIMEOUT, Comm, timeout_of
from zerotrain.runtime.comm.start import init_distributed
from zerotrain.runtime.comm.watchdog import Progress, Watchdog
from zerotrain.runtime.train import rendezvous

A_MONTH_S = 31 * 86_400.0
BACKSTOP_S = 3.0
PATIENCE_S = 40.0
"""Of the rank that stays away: only when the property does not hold does it end the test."""


def test_the_groups_timeout() -> None:
    assert timeout_of(CommEnv.from_env({})) == DEFAULT_TIMEOUT
    given = CommEnv.from_env({"ZEROTRAIN_HANG_BACKSTOP_SECONDS": str(A_MONTH_S)})
    assert timeout_of(given) == timedelta(days=31)


def wait_for_rank_1(comm: Comm | None) -> str:
    """What rank 0 is told, which waits in a collective of the engine's or, without one, of the default group;
    rank 1 stays away until then."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        try:
            store.wait(["told"], timedelta(seconds=PATIENCE_S))
        except RuntimeError:
            os._exit(1)
        return ""
    try:
        if comm is None:
            dist.all_reduce(torch.ones(1))
        else:
            comm.start_exchange(torch.zeros(40_000), label="blocks.0").wait()
    except RuntimeError as error:
        return str(error)
    finally:
        store.set("told", "1")
    return "it went through"


def give_up(transport: str) -> str:
    os.environ |= {
        "ZEROTRAIN_TRANSPORT": transport,
        "ZEROTRAIN_HANG_BACKSTOP_SECONDS": str(BACKSTOP_S),
        "ZEROTRAIN_WATCHDOG_SECONDS": "0",
    }
    dist.barrier()
    comm = Comm(device=torch.device("cpu"))
    try:
        return wait_for_rank_1(comm)
    finally:
        comm.close()


@pytest.mark.parametrize(("transport", "words"), [("shared", "within 3 s"), ("gloo", "imed out")])
def test_a_collective_of_the_engine_ends_then(transport: str, words: str) -> None:
    told, _ = run_ranks(2, give_up, transport)
    assert words in told


def launch_of(port: int, backstop_s: float | None) -> LaunchSpec:
    return LaunchSpec(
        job="demo",
        job_uid="uid-1",
        attempt=1,
        master_addr="127.0.0.1",
        master_port=port,
        world_size=2,
        node_rank=0,
        ranks_per_worker=2,
        config_path=Path("ds_config.json"),
        hang_backstop_seconds=backstop_s,
    )


def meet_and_give_up(port: int) -> str:
    """As the trainer meets the others, on a group of its own."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    rendezvous.join(launch_of(port, BACKSTOP_S), RankEnv(rank=rank, local_rank=rank, local_world_size=2))
    return wait_for_rank_1(None)


def test_a_collective_of_the_trainers_group_ends_then() -> None:
    told, _ = run_ranks(2, meet_and_give_up, free_port())
    assert "imed out" in told


MEETING_S, LATE_S = 3.0, 4.5


def meet_late(port: int, backstop_s: float) -> list[float]:
    """Rank 1 comes later than `MEETING_TIMEOUT` allows, to a collective and to what it has to store."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    rendezvous.MEETING_TIMEOUT = timedelta(seconds=MEETING_S)
    rendezvous.join(launch_of(port, backstop_s), RankEnv(rank=rank, local_rank=rank, local_world_size=2))
    store = dist.distributed_c10d._get_default_store()
    sum_of = torch.ones(1)
    time.sleep(rank * LATE_S)
    dist.all_reduce(sum_of)
    dist.all_reduce(sum_of, group=dist.new_group(timeout=timedelta(seconds=backstop_s)))
    time.sleep(rank * LATE_S)
    if rank == 1:
        store.set("late", "1")
    return [float(sum_of), float(store.get("late"))]


def test_a_month_is_as_good_as_any_timeout() -> None:
    """Which in milliseconds is more than 32 bits hold."""
    assert run_ranks(2, meet_late, free_port(), A_MONTH_S) == [[4.0, 1.0]] * 2


def start_by_oneself(port: int) -> str:
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ZEROTRAIN_HANG_BACKSTOP_SECONDS": str(BACKSTOP_S),
    }
    init_distributed()
    return wait_for_rank_1(None)


def test_a_script_that_makes_the_group_itself_waits_as_long() -> None:
    told, _ = run_ranks(2, start_by_oneself, free_port())
    assert "imed out" in told


def test_ranks_that_can_never_meet_are_told_as_soon_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CommEnv().watchdog_seconds * watchdog.MISMATCH_SHARE == watchdog.MAX_MISMATCH_S
    monkeypatch.setattr(watchdog, "MAX_MISMATCH_S", 0.2)
    verdicts: queue.Queue[str] = queue.Queue()
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("zerotrain-watchdog/1", Progress(started=1, recent={1: "B"}, waiting_for=1).to_json())
    dog = Watchdog(store, rank=0, world_size=2, bound_seconds=A_MONTH_S, on_verdict=verdicts.put)
    try:
        dog.start("A", NeverOver())
        assert "and cannot end: as collective 1 rank 1 started B" in verdicts.get(timeout=30)
    finally:
        dog.close()


class NeverOver:
    def is_completed(self) -> bool:
        return False
