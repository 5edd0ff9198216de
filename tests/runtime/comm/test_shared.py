"""Collectives between ranks of one host through shared memory: the same bits as gloo, nothing left behind."""

from __future__ import annotations

import mmap
import os
import platform
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankFailed, run_ranks
from tests.support.training import Case, train_with_engine
from zerotrain.contract.worker_environment import CommEnv
from zerotrain.runtime.comm import barrier_counters, fd_exchange, memory
from zerotrain.runtime.comm import shared as shared_module
from zerotrain.runtime.comm.arena import Arena, has_copies, map_in_a_row
from zerotrain.runtime.comm.group import Comm, CommError

pytestmark = pytest.mark.ranks


CASES = tuple(
    Case(stage=stage, dtype=dtype, accumulation=accumulation, clip=0.3)
    for stage, dtype, accumulation in (
        *((stage, dtype, 1) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")),
        *((stage, "bf16", 2) for stage in (1, 3)),
    )
)
Bits = list[tuple[list[float], list[float], dict[str, bytes]]]


def comm_by(transport: str, delay_seconds: float = 0.0) -> Comm:
    options = CommEnv(transport=transport, delay_seconds=delay_seconds)
    return Comm(device=torch.device("cpu"), options=options)


def train_by(cases: tuple[Case, ...], transport: str, delay_seconds: float) -> Bits:
    os.environ["ZEROTRAIN_TRANSPORT"] = transport
    os.environ["ZEROTRAIN_COLLECTIVE_DELAY_SECONDS"] = str(delay_seconds)
    outcomes = [train_with_engine(case) for case in cases]
    return [
        (outcome.losses, outcome.norms, {name: value.tobytes() for name, value in outcome.parameters.items()})
        for outcome in outcomes
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_training_has_the_same_bits_as_with_gloo_and_with_delays(world_size: int) -> None:
    cases = CASES if world_size == 2 else CASES[1::3]
    shared = run_ranks(world_size, train_by, cases, "shared", 0.0)
    assert shared == run_ranks(world_size, train_by, cases, "gloo", 0.0)
    assert shared == run_ranks(world_size, train_by, cases, "shared", 0.002)


def every_collective(transport: str) -> list[list[float]]:
    """Run all on buffers inside and outside of shared memory, of changing sizes, with several in flight."""
    comm = comm_by(transport)
    assert comm.shares_memory is (transport == "shared"), comm.transport_reason
    results: list[list[float]] = []
    for iteration, numel in enumerate((1, 5, 70_000, 5, 1, 70_000) * 3):
        values = torch.arange(float(numel)) + 100 * comm.rank + iteration
        full = torch.empty(comm.world_size * numel)
        sent = comm.memory.borrow(comm.world_size * numel, torch.float32)
        assert not sent.any(), "a borrowed buffer must be zeros"
        sent.copy_(values.repeat(comm.world_size))
        exchange = comm.start_exchange(sent, label="exchange")
        outside = comm.start_exchange(2 * sent.clone(), label="of private memory")
        gather = comm.all_gather(full, values, label="gather")
        part = full.new_empty(comm.world_size, numel)[comm.rank].copy_(values)
        for one in (outside, exchange):
            one.wait()
            results.append([float(part.sum()) for part in one.parts()])
            one.finish()
        comm.memory.give_back(sent)
        gather.wait()
        results.append([float(full.sum()), float(full[-1]), float(part[0])])
        results.append([value for row in comm.gather_record([iteration, comm.rank]) for value in row])
    comm.close()
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_gives_what_gloo_gives(world_size: int) -> None:
    shared, gloo = (run_ranks(world_size, every_collective, name) for name in ("shared", "gloo"))
    assert shared == gloo


def gather_mapped() -> list[list[float]]:
    """Gather shards that all ranks map, without a copy; own writes stay local until the next gather."""
    comm = comm_by("shared")
    shard = comm.memory.keep(4096, torch.bfloat16)
    shard.fill_(comm.rank + 1)
    pages = comm.memory.map_shards(shard)
    assert pages is not None
    full = torch.frombuffer(pages, dtype=torch.bfloat16)
    seen = []
    for iteration in range(2):
        comm.all_gather(full, shard, label="weights").wait()
        seen.append(full[::4096].tolist())
        full.fill_(99)
        seen.append(full[::4096].tolist())
        comm.gather_record([0.0])
        shard.add_(10 * (iteration + 1))
    comm.close()
    return seen


def test_a_mapped_gather_sees_updates_and_drops_writes() -> None:
    for seen in run_ranks(2, gather_mapped):
        assert seen == [[1.0, 2.0], [99.0, 99.0], [11.0, 12.0], [99.0, 99.0]]


def gather_many(budget: int) -> tuple[bool, list[float]]:
    """Start more gathers than a channel has slots for, with no mapping beyond the budget of rank 1."""
    barrier_counters.RING, shared_module.MOST_UNFINISHED = 8, 4
    memory.most_mappings = lambda: budget if dist.get_rank() else 1 << 15  # type: ignore[assignment]
    comm = comm_by("shared")
    units = []
    for unit in range(20):
        shard = comm.memory.keep(4096, torch.float32).fill_(unit + 100 * comm.rank)
        pages = comm.memory.map_shards(shard)
        full = torch.empty(2 * 4096) if pages is None else torch.frombuffer(pages, dtype=torch.float32)
        units.append((shard, full, pages))
    waits = [comm.all_gather(full, shard, label="unit") for shard, full, _ in units]
    for pending in waits:
        pending.wait()
    comm.gather_record([0.0])
    comm.close()
    return all(pages is not None for *_, pages in units), [float(full[::4096].sum()) for _, full, _ in units]


@pytest.mark.parametrize("budget", [1 << 15, 9])
def test_many_units_fit_the_board_and_the_mappings(budget: int) -> None:
    expected = budget > 9, [100.0 + 2 * unit for unit in range(20)]
    assert run_ranks(2, gather_many, budget) == [expected] * 2


def test_copies_of_a_private_mapping_are_noticed() -> None:
    arena = Arena(1 << 24)
    shard = arena.zeros(mmap.PAGESIZE, torch.uint8)
    pages = map_in_a_row([(arena.fd, arena.offset_of(shard) or 0)] * 3, shard.nbytes)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    assert whole.sum() == 0
    assert not has_copies(whole.data_ptr(), whole.nbytes)
    whole[mmap.PAGESIZE + 3] = 1
    assert has_copies(whole.data_ptr(), whole.nbytes)
    pages.madvise(mmap.MADV_DONTNEED)
    assert not has_copies(whole.data_ptr(), whole.nbytes)
    assert whole.sum() == 0


def test_an_arena_gives_memory_back_and_reuses_it() -> None:
    arena = Arena(1 << 24)
    first, second = arena.zeros(3_000_000, torch.uint8), arena.zeros(5_000, torch.uint8)
    first.fill_(7)
    used = os.fstat(arena.fd).st_blocks
    arena.free(first)
    assert os.fstat(arena.fd).st_blocks < used - 5_000
    again = arena.zeros(3_000_000, torch.uint8)
    assert again.data_ptr() == first.data_ptr()
    assert not again.any()
    arena.free(second)
    arena.free(again)
    arena.zeros(1 << 24, torch.uint8)  # free ranges were merged
    with pytest.raises(MemoryError):
        arena.zeros(1, torch.uint8)


def die_in_a_collective(report: Path) -> None:
    """Kill rank 1 while rank 0 waits for it; rank 0 records its error and its named memory.

    It looks at what it has mapped itself: other processes use /dev/shm at the same time.
    """
    comm = comm_by("shared")
    comm.memory.keep(1 << 20, torch.float32).fill_(1.0)
    dist.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommError) as caught:
        comm.gather_record([1.0])
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert any("/memfd:" in line for line in maps)
    named = [line for line in maps if "/dev/shm/" in line and not line.endswith("(deleted)")]
    report.write_text(f"{caught.value}\n{named}")


def test_a_killed_rank_is_named_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    report = tmp_path / "survivor"
    with pytest.raises(RankFailed, match="rank 1: the process died"):
        run_ranks(2, die_in_a_collective, report)
    message, left = report.read_text().splitlines()
    assert message == (
        "all_gather for 'step record' on rank 0 failed, because another rank ended or left: rank 1"
    )
    assert left == "[]"


def ask(transport: str, obstacle: str) -> tuple[bool, str]:
    rank = dist.get_rank()
    if obstacle == "machine":
        platform.machine = lambda: "riscv64"
    elif obstacle == "memfd of rank 1" and rank == 1:
        os.memfd_create = _refuse
    elif obstacle == "fds of rank 0" and rank == 0:
        fd_exchange.receive_descriptor = _lose
    elif obstacle == "other host":
        fd_exchange.host_key = lambda: bytes([rank + 1]) * 32
    elif obstacle == "two nodes":
        os.environ["LOCAL_WORLD_SIZE"] = "1"
    comm = Comm(
        device=torch.device("cpu"), options=replace(CommEnv.from_env(os.environ), transport=transport)
    )
    rows = comm.gather_record([float(comm.rank)])
    comm.close()
    assert rows == [[0.0], [1.0]]
    return comm.shares_memory, comm.transport_reason


def _refuse(*_: object, **__: object) -> Any:
    raise OSError("not here")


def _lose(connection: socket.socket, num_bytes: int) -> Any:
    connection.recv(num_bytes)  # the sender must have sent before it receives
    _refuse()


def test_the_choice_is_one_and_has_a_reason() -> None:
    """Every rank makes the same choice; gloo is used if memory cannot be shared."""
    (first, reason), other = run_ranks(2, ask, "auto", "")
    assert (first, reason) == other
    assert reason.startswith("probe: ")
    assert run_ranks(2, ask, "gloo", "") == [(False, "gloo was requested")] * 2


@pytest.mark.parametrize(
    ("obstacle", "reasons"),
    [
        ("machine", ["memory ordering of riscv64"] * 2),
        ("memfd of rank 1", ["another rank cannot share memory", "memory cannot be shared: not here"]),
        ("fds of rank 0", ["memory cannot be shared: not here", "another rank cannot map"]),
        ("other host", ["the ranks are on several hosts"] * 2),
        ("two nodes", ["the ranks are on 2 nodes"] * 2),
    ],
)
def test_one_rank_that_cannot_share_is_enough(obstacle: str, reasons: list[str]) -> None:
    for (shared, found), expected in zip(run_ranks(2, ask, "shared", obstacle), reasons, strict=True):
        assert not shared
        assert expected in found
