"""Agreement of the ranks of a save or load: small gathers of integers and texts over a process group.

Objects are never pickled across ranks: errors travel as UTF-8, outcomes as int64 records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from zerotrain.runtime.comm.group import Comm


class RankGroup(Protocol):
    """The ranks that save or load together."""

    rank: int
    world_size: int

    def gather(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Return every rank's record, in rank order. All ranks pass the same number of values."""

    def broadcast_text(self, text: str, *, source: int) -> str:
        """Return the text of rank `source`, on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A problem of one rank, as all ranks know it."""

    rank: int
    text: str
    is_grave: bool = False
    """Whether the problem outweighs those of lower ranks."""


class SingleRank:
    """A world of one rank."""

    rank = 0
    world_size = 1

    def gather(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(values)]

    def broadcast_text(self, text: str, *, source: int) -> str:
        return text


class ProcessGroupRanks:
    """Ranks of a torch.distributed process group (gloo on the host, NCCL on the accelerator without an
    engine)."""

    def __init__(self, group: dist.ProcessGroup | None = None, comm: Comm | None = None) -> None:
        """Use a process group. `comm`: the engine's, whose watchdog then supervises the waits."""
        self._group, self._comm = group, comm
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        on_gpu = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def gather(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        mine = torch.tensor(list(values), dtype=torch.int64, device=self._device)
        records = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._wait(dist.all_gather(records, mine, group=self._group, async_op=True), "gather")
        return [tuple(int(value) for value in record.tolist()) for record in records]

    def broadcast_text(self, text: str, *, source: int) -> str:
        data = text.encode()
        length = self.gather([len(data)])[source][0]
        if length == 0:
            return ""
        content = bytearray(data if self.rank == source else bytes(length))
        buffer = torch.frombuffer(content, dtype=torch.uint8).to(self._device)
        work = dist.broadcast(buffer, group=self._group, group_src=source, async_op=True)
        self._wait(work, "broadcast")
        return bytes(buffer.cpu().tolist()).decode()

    def _wait(self, work: Any, operation: str) -> None:
        """Wait for a collective. Raises CommError under an engine."""
        if self._comm is not None:
            work = self._comm.watch(work, f"{operation} for 'checkpoint'", on_host=True)
        work.wait()


def ranks_of(comm: Comm) -> RankGroup:
    """Return the ranks of an engine."""
    return SingleRank() if comm.world_size == 1 else ProcessGroupRanks(comm.hosts, comm)


def default_group() -> RankGroup:
    """Return the default process group when torch.distributed runs, otherwise a world of one. For programs
    without an engine; an engine's ranks are `ranks_of` its `comm`."""
    if dist.is_available() and dist.is_initialized():
        return ProcessGroupRanks()
    return SingleRank()


def first_problem(group: RankGroup, problem: str | None, *, grave: bool = False) -> Problem | None:
    """Return the problem of the lowest rank with a grave one, else of the lowest with any, None when there is
    none; the same on every rank."""
    flags = [flag for (flag,) in group.gather([0 if problem is None else 1 + grave])]
    worst = max(flags)
    if worst == 0:
        return None
    source = flags.index(worst)
    text = group.broadcast_text(problem or "", source=source)
    return Problem(rank=source, text=text, is_grave=worst > 1)
