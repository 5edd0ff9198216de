"""Decides at start-up whether the ranks of a group use shared memory; called by `group.py`.

They do if all of them are on one host, can exchange their memory files, and a probe on the real group finds
it faster than gloo. Every decision is made collectively, so that all ranks use the same transport. The
decision and its reason are kept for the metrics.
"""

from __future__ import annotations

import os
import platform
import timeit
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from zerotrain.runtime.comm.arena import Arena, PeerArena
from zerotrain.runtime.comm.barrier_counters import COUNTERS_BYTES, BarrierCounters, PeerCounters
from zerotrain.runtime.comm.fd_exchange import FACTS_BYTES, FdExchange, Neighbour
from zerotrain.runtime.comm.memory import SharedMemory
from zerotrain.runtime.comm.shared import SharedGroup

_PROBE_NUMEL = 1 << 16
_PROBE_ROUNDS = 3
_ADDRESS_BYTES = 32 << 40
"""Address space in bytes for the files of all ranks of a host together."""


def share_memory(
    *, rank: int, world_size: int, timeout_seconds: float, probe: bool
) -> tuple[SharedGroup | None, str]:
    """Return the group in shared memory and the reason, or None and the reason. Collective; the decision is
    the same on all ranks.

    `probe` False uses shared memory wherever it works.
    """
    fd_exchange, arena, problem = _prepare(world_size)
    try:
        facts = _all_gather_bytes(fd_exchange.facts() if fd_exchange else bytes(FACTS_BYTES), world_size)
        if not all(any(fact) for fact in facts) or fd_exchange is None or arena is None:
            return None, problem or "another rank cannot share memory"
        neighbours = [Neighbour.parse(fact) for fact in facts]
        if len({neighbour.host for neighbour in neighbours}) > 1:
            return None, "the ranks are on several hosts"
        group, problem = _join(fd_exchange, arena, neighbours, rank=rank, timeout_seconds=timeout_seconds)
    finally:
        if fd_exchange is not None:
            fd_exchange.close()
    if not _all_agree(group is not None) or group is None:
        if group is not None:
            group.close()
        return None, problem or "another rank cannot map this one's memory"
    if not probe:
        return group, "requested"
    shared, gloo = _probe(group)
    if shared < gloo:
        return group, f"probe: {shared * 1e6:.0f} us against {gloo * 1e6:.0f} us with gloo"
    group.close()
    return None, f"probe: gloo is faster, {gloo * 1e6:.0f} us against {shared * 1e6:.0f} us"


def _prepare(world_size: int) -> tuple[FdExchange | None, Arena | None, str]:
    """Do all that a rank can do alone, or return the problem: the other ranks must not wait for one that
    cannot."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None, None, f"the memory ordering of {platform.machine()} is not supported"
    if not hasattr(os, "memfd_create"):
        return None, None, "this system has no memfd"
    try:
        return FdExchange(), Arena(_arena_bytes(world_size)), ""
    except (OSError, ValueError) as error:
        return None, None, f"memory cannot be shared: {error}"


def _join(
    fd_exchange: FdExchange,
    arena: Arena,
    neighbours: Sequence[Neighbour],
    *,
    rank: int,
    timeout_seconds: float,
) -> tuple[SharedGroup | None, str]:
    try:
        words = arena.zeros(COUNTERS_BYTES // 8, torch.int64)
        assert arena.offset_of(words) == 0  # peers look for it there
        peer_fds = fd_exchange.run(rank, neighbours, arena.fd)
        peers = {peer: PeerArena(peer_fd.fd) for peer, peer_fd in peer_fds.items()}
    except (OSError, ValueError, MemoryError) as error:
        return None, f"memory cannot be shared: {error}"
    peer_counters = {
        peer: PeerCounters(_words(arena_of.pages), _pidfd(peer_fds[peer].pid))
        for peer, arena_of in peers.items()
    }
    counters = BarrierCounters(rank, _words(arena.pages), peer_counters, timeout_seconds=timeout_seconds)
    return SharedGroup(counters, SharedMemory(counters, arena, peers)), ""


def _words(pages: object) -> memoryview:
    return memoryview(pages)[:COUNTERS_BYTES].cast("q")  # type: ignore[arg-type]


def _pidfd(pid: int) -> int | None:
    with suppress(OSError, AttributeError):
        return os.pidfd_open(pid) if pid > 0 else None
    return None


def _arena_bytes(world_size: int) -> int:
    """Return the address space of one rank: twice the memory of the machine, as far as all ranks' files
    fit."""
    total = 64 << 30
    with suppress(OSError, ValueError, IndexError):
        total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    return min(2 * total, _ADDRESS_BYTES // world_size) // (2 << 20) * (2 << 20)


def _all_gather_bytes(mine: bytes, world_size: int) -> list[bytes]:
    full = [torch.empty(len(mine), dtype=torch.uint8) for _ in range(world_size)]
    dist.all_gather(full, torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    return [bytes(row.tolist()) for row in full]


def _all_agree(yes: bool) -> bool:
    vote = torch.tensor([int(yes)])
    dist.all_reduce(vote, op=dist.ReduceOp.MIN)
    return bool(vote.item())


def _probe(group: SharedGroup) -> tuple[float, float]:
    """Measure the seconds of one all-gather of 256 KiB per rank through memory and through gloo.

    Each is the best of a few rounds, taken from the slowest rank; the numbers are the same on every rank.
    """
    shard = torch.zeros(_PROBE_NUMEL)
    full = torch.zeros(_PROBE_NUMEL * group.world_size)
    parts = list(full.view(group.world_size, -1))

    ways: tuple[Callable[[], object], ...] = (
        lambda: group.all_gather(full, shard, "the probe").wait(),
        lambda: dist.all_gather(parts, shard),
    )
    best = [min(timeit.repeat(way, number=1, repeat=_PROBE_ROUNDS)) for way in ways]
    seconds = torch.tensor(best, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds[0]), float(seconds[1])
