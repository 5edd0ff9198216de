"""The operator limits how long ranks wait for each other where it handles hangs. Ranks that can
never meet fail as early as without it."""

from __future__ import annotations

import os
import queue
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ports import free_port
from tests.support.ranks import run_ranks
from zerotrain.contract.worker_environment import CommEnv, LaunchSpec, RankEnv
from zerotrain.runtime.comm import watchdog
from zerotrain.runtime.comm.group import DEFAULT_TIMEOUT, Comm, timeout_of
from zerotrain.runtime.comm.mismatch import Progress
from zerotrain.runtime.comm.start import init_distributed
from zerotrain.runtime.comm.watchdog import Watchdog, own_store
from zerotrain.runtime.train import rendezvous
from zerotrain.runtime.zero.hierarchy import NodeHops
from zerotrain.runtime.zero.ledger import MemoryLedger
from zerotrain.runtime.zero.zeropp import Traffic, ZeroPlusPlus

pytestmark = pytest.mark.ranks


A_MONTH_S = 31 * 86_400.0
BACKSTOP_S = 3.0
PATIENCE_S = 40.0
"""Seconds that the absent rank waits; they end the test only if the property does not hold."""


def test_the_groups_timeout() -> None:
    assert timeout_of(CommEnv.from_env({})) == DEFAULT_TIMEOUT
    given = CommEnv.from_env({"ZEROTRAIN_HANG_BACKSTOP_SECONDS": str(A_MONTH_S)})
    assert timeout_of(given) == timedelta(days=31)


def wait_for_rank_1(comm: Comm | None) -> str:
    """The error of rank 0, which waits in a collective of the engine's or, without one, of the default group;
    rank 1 stays away until then."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        try:
            store.wait(["passed"], timedelta(seconds=PATIENCE_S))
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
        store.set("passed", "1")
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
    message, _ = run_ranks(2, give_up, transport)
    assert words in message


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
    """Meet the others as the trainer does, on a separate group."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    rendezvous.join(launch_of(port, BACKSTOP_S), RankEnv(rank=rank, local_rank=rank, local_world_size=2))
    return wait_for_rank_1(None)


def test_a_collective_of_the_trainers_group_ends_then() -> None:
    message, _ = run_ranks(2, meet_and_give_up, free_port())
    assert "imed out" in message


MEETING_S, LATE_S = 3.0, 4.5


def meet_late(port: int, backstop_s: float) -> list[float]:
    """Let rank 1 come later than `MEETING_TIMEOUT` allows, to a collective and to a key in the store."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    rendezvous.MEETING_TIMEOUT = timedelta(seconds=MEETING_S)
    rendezvous.join(launch_of(port, backstop_s), RankEnv(rank=rank, local_rank=rank, local_world_size=2))
    store = dist.distributed_c10d._get_default_store()
    sum_of = torch.ones(1)
    time.sleep(rank * LATE_S)
    dist.all_reduce(sum_of)
    group = dist.new_group(timeout=timedelta(seconds=backstop_s))
    assert isinstance(group, dist.ProcessGroup)  # torch returns an int for ranks that are no members
    dist.all_reduce(sum_of, group=group)
    time.sleep(rank * LATE_S)
    if rank == 1:
        store.set("late", "1")
    return [float(sum_of), float(store.get("late"))]


def test_a_month_is_as_good_as_any_timeout() -> None:
    """A month in milliseconds does not fit into 32 bits."""
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
    message, _ = run_ranks(2, start_by_oneself, free_port())
    assert "imed out" in message


def test_ranks_that_can_never_meet_fail_as_early_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CommEnv().watchdog_seconds * watchdog.PATIENCE_SHARE > watchdog.MAX_PATIENCE_S
    monkeypatch.setattr(watchdog, "MAX_PATIENCE_S", 0.2)
    failures: queue.Queue[str] = queue.Queue()
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("zerotrain-watchdog/1", Progress(started=1, recent={1: "B"}, waiting_for=1).to_json())
    dog = Watchdog(store, rank=0, world_size=2, bound_seconds=A_MONTH_S, on_failure=failures.put)
    try:
        dog.start("A", NeverOver())
        assert "and cannot end: as collective 1 rank 1 started B" in failures.get(timeout=30)
    finally:
        dog.close()


class NeverOver:
    def is_completed(self) -> bool:
        return False


def join_two_nodes(port: int) -> None:
    """Join with ranks 0 and 1 on one node, 2 and 3 on the other."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "4",
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ZEROTRAIN_HANG_BACKSTOP_SECONDS": str(A_MONTH_S),
    }
    init_distributed()


def timeouts(port: int, of_a_part: bool) -> list[float]:
    """Return the timeouts in seconds of the engine's groups and the default one.

    With `of_a_part`, ranks 0 and 2 have another engine than ranks 1 and 3.
    """
    join_two_nodes(port)
    parts = [dist.new_group([part, part + 2]) for part in range(2)] if of_a_part else []
    comm = Comm(device=torch.device("cpu"), group=parts[dist.get_rank() % 2] if parts else None)
    traffic = Traffic(comm, MemoryLedger(), ZeroPlusPlus(hpz_ranks=2, quantized_gradients=True))
    made = [group for group in dist.distributed_c10d._world.pg_map if group not in parts]
    found = [group._get_backend(comm.device).options._timeout.total_seconds() for group in made]
    traffic.close()
    assert not comm.subgroups
    comm.close()
    return found


@pytest.mark.parametrize(("of_a_part", "groups"), [(False, 5), (True, 3)])
def test_every_group_of_a_job_of_two_nodes_waits_as_long(of_a_part: bool, groups: int) -> None:
    """Two groups have all ranks; the others are those of the neighbours, of the node and across nodes.

    A part of the ranks, one on each node, has its second group and, once per pair of ranks, the one across.
    """
    assert run_ranks(4, timeouts, free_port(), of_a_part) == [[A_MONTH_S] * groups] * 4


class UntilAborted:
    """A collective on a GPU that ends only when its group is aborted."""

    def __init__(self, group: Any) -> None:
        self.over = _ABORTED.setdefault(group.group_name, threading.Event())

    def is_completed(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        if not self.over.wait(PATIENCE_S):
            raise RuntimeError("its group was not aborted")


_ABORTED: dict[str, threading.Event] = {}


def part_as_on_gpus(port: int, hop: str) -> str:
    """The error of a rank whose rank 1 goes on to another collective than the subgroups'."""
    join_two_nodes(port)
    watchdog.MAX_PATIENCE_S = 1.0
    comm = Comm(device=torch.device("cpu"))
    hops = NodeHops(comm)
    setattr(dist, "all_to_all_single", lambda *_, group, async_op: UntilAborted(group))  # noqa: B010
    setattr(dist.ProcessGroup, "abort", lambda group: UntilAborted(group).over.set())  # noqa: B010
    assert comm._watchdog is not None
    comm._watchdog.close()
    store = own_store("on GPUs")
    comm._watchdog = Watchdog(
        store, rank=comm.rank, world_size=4, bound_seconds=A_MONTH_S, on_failure=comm._abort
    )
    try:
        if comm.rank == 1:
            comm.start_exchange(torch.zeros(8), label="blocks.1").wait()
        else:
            getattr(hops, hop).all_to_all(torch.zeros(8), torch.zeros(8), label="blocks.0").wait()
    except RuntimeError as error:
        return str(error)
    finally:
        comm._watchdog.close()
        store.add("passed", 1)
        while comm.rank == 0 and store.add("passed", 0) < 4:  # the store, which they compare by, is its own
            time.sleep(0.05)
    return "it went through"


@pytest.mark.parametrize("hop", ["within", "across"])
def test_a_failure_ends_waits_in_the_groups_of_nodes_too(hop: str) -> None:
    for rank, message in enumerate(run_ranks(4, part_as_on_gpus, free_port(), hop)):
        assert f"on rank {rank} has waited" in message
        assert "and cannot end: as collective 1 rank" in message
