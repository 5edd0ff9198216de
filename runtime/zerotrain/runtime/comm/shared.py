"""Collectives between ranks of one host through shared memory; used by `group.py`.

[Note: reading in place] Nothing is sent. A rank that starts a collective announces the offset of its buffer.
A rank that waits for the result copies the others' buffers straight to the destination. So a buffer must not
change until all ranks have read it. `borrow` hands out only buffers that no rank reads any more. Buffers from
`keep` (weights, accumulators) may be written after a collective that every rank entered after its last use;
the step record at the step boundary is one.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial

import torch

from zerotrain.runtime.comm.arena import has_copies
from zerotrain.runtime.comm.barrier_counters import EXCHANGES, GATHERS, RING, BarrierCounters
from zerotrain.runtime.comm.memory import SharedMemory
from zerotrain.runtime.comm.work import Ready

MOST_UNFINISHED = RING // 2
"""Maximum number of gathers in flight. A channel has `RING` slots, and a rank that waits for a free slot
while all ranks wait would deadlock, so the oldest gathers are finished early instead."""


class SharedGroup:
    """All ranks of a group that is on one host; every rank calls every method in the same order."""

    def __init__(self, counters: BarrierCounters, memory: SharedMemory) -> None:
        self.counters = counters
        self.memory = memory
        self.rank = counters.rank
        self.world_size = len(memory.peers) + 1
        self._unfinished: dict[int, Callable[[], None]] = {}
        """Gathers that were not waited for on this rank, by number."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, what: str) -> Ready:
        """Start `Comm.all_gather`. If `full` is a mapping of all ranks' shards, it is whole as soon as all
        ranks have arrived."""
        while len(self._unfinished) >= MOST_UNFINISHED:
            next(iter(self._unfinished.values()))()
        pages = self.memory.mapping_of(full)
        if pages is not None:
            number = self.counters.start(GATHERS)
            return self._once(number, partial(self._make_whole, full, pages, number, what))
        number, staged = self._announce(GATHERS, shard)
        return self._once(number, partial(self._collect, full, shard, number, staged, what))

    def exchange(self, sent: torch.Tensor, what: str) -> SharedExchange:
        """Start an all-to-all of equal parts."""
        number, staged = self._announce(EXCHANGES, sent)
        return SharedExchange(self, number=number, sent=sent, staged=staged, what=what)

    def finish(self, channel: int, number: int, staged: torch.Tensor | None) -> None:
        """Record that this rank has read all it needs of a collective."""
        self.counters.finish(channel, number)
        if staged is not None:
            self.memory.give_back(staged)

    def close(self) -> None:
        """Start no more collectives. Memory lives as long as tensors refer to it, here and on the other
        ranks."""
        self.counters.close()
        self.memory.arena.close()
        for peer in self.memory.peers.values():
            peer.close()

    def _once(self, number: int, complete: Callable[[], None]) -> Ready:
        def wait() -> None:
            if number in self._unfinished:
                complete()
                del self._unfinished[number]

        self._unfinished[number] = wait
        return Ready(wait)

    def _announce(self, channel: int, tensor: torch.Tensor) -> tuple[int, torch.Tensor | None]:
        """Start a collective that reads `tensor`; return its number, and the copy if other ranks cannot read
        `tensor`."""
        offset, staged = self.memory.arena.offset_of(tensor), None
        if offset is None:
            staged = self.memory.borrow(tensor.numel(), tensor.dtype)
            staged.copy_(tensor)
            offset = self.memory.arena.offset_of(staged)
            assert offset is not None  # the tensor was borrowed
        number = self.counters.start(channel, offset)
        self.memory.lend_to(tensor if staged is None else staged, channel, number)
        return number, staged

    def _collect(
        self, full: torch.Tensor, shard: torch.Tensor, number: int, staged: torch.Tensor | None, what: str
    ) -> None:
        parts = full.view(self.world_size, -1)
        if parts[self.rank].data_ptr() != shard.data_ptr():
            parts[self.rank].copy_(shard)
        self.counters.arrive(GATHERS, number, what)
        for rank, part in enumerate(parts):
            if rank != self.rank:
                offset = self.counters.offset(GATHERS, number, rank)
                part.copy_(self.view(rank, offset, part.numel(), part.dtype))
        self.finish(GATHERS, number, staged)

    def _make_whole(self, mapped: torch.Tensor, pages: mmap.mmap, number: int, what: str) -> None:
        """Wait for all ranks, and drop the pages that this process wrote: the shards themselves are mapped
        already."""
        self.counters.arrive(GATHERS, number, what)
        if has_copies(mapped.data_ptr(), mapped.nbytes):
            pages.madvise(mmap.MADV_DONTNEED)
        self.counters.finish(GATHERS, number)

    def view(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """View a part of the memory of a rank."""
        arena = self.memory.arena if rank == self.rank else self.memory.peers[rank]
        return arena.view(offset, numel, dtype)


class SharedExchange(Ready):
    """An all-to-all in flight whose parts are read in place."""

    def __init__(
        self, group: SharedGroup, *, number: int, sent: torch.Tensor, staged: torch.Tensor | None, what: str
    ) -> None:
        super().__init__(partial(group.counters.arrive, EXCHANGES, number, what))
        self._group = group
        self._number = number
        self._sent = sent
        self._staged = staged

    def parts(self) -> list[torch.Tensor]:
        """Return what every rank sends to this one, in rank order; blocks. Read only."""
        self.wait()
        group, sent = self._group, self._sent
        numel = sent.numel() // group.world_size
        start = group.rank * numel * sent.element_size()
        offsets = [group.counters.offset(EXCHANGES, self._number, rank) for rank in range(group.world_size)]
        return [group.view(rank, offset + start, numel, sent.dtype) for rank, offset in enumerate(offsets)]

    def finish(self) -> None:
        """Declare that the parts have been read."""
        self._group.finish(EXCHANGES, self._number, self._staged)
