"""Memory for the buffers of collectives: private to a rank, or read by the other ranks of its host."""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from zerotrain.runtime.comm.arena import Arena, PeerArena, map_in_a_row
from zerotrain.runtime.comm.barrier_counters import GATHERS, BarrierCounters

_PATIENCE_SECONDS = 0.05
"""Seconds that `borrow` waits for slow readers before it allocates more memory. The wait is bounded because a
reader may itself wait for a collective that this rank has not reached."""

_SMALL_BYTES = 1 << 16
"""Size in bytes below which a buffer, such as a step record, is never freed."""


class Memory(Protocol):
    """Allocator of the buffers that take part in collectives."""

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of zeros to send from; release it with `give_back`."""
        ...

    def give_back(self, tensor: torch.Tensor) -> None:
        """Take back a tensor from `borrow`."""
        ...

    def keep(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of zeros to send from, which lives as long as the engine."""
        ...

    def drop(self, tensor: torch.Tensor) -> None:
        """Free the memory of a tensor from `keep`. No rank may use it any more."""
        ...

    def map_shards(self, shard: torch.Tensor) -> mmap.mmap | None:
        """Return one mapping of the shards of all ranks (each from `keep`) in rank order, private to this
        process when written to; None if that is not available. Collective."""
        ...


class PrivateMemory:
    """Memory that only this process can read, on its device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.keep(numel, dtype)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Do nothing: the memory is freed when the caller drops the tensor."""

    def keep(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of zeros. On CPU it is a mapping of its own, as malloc keeps freed megabytes in
        its heap."""
        if self._device.type != "cpu" or numel == 0:
            return torch.zeros(numel, dtype=dtype, device=self._device)
        pages = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=dtype)

    def drop(self, tensor: torch.Tensor) -> None:
        """Do nothing: the memory is freed when the caller drops the tensor."""

    def map_shards(self, shard: torch.Tensor) -> mmap.mmap | None:
        return None


def unfilled(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a private 1-D tensor that the caller overwrites as a whole; on a GPU nothing fills it before."""
    if device.type == "cpu":
        return PrivateMemory(device).keep(numel, dtype)
    return torch.empty(numel, dtype=dtype, device=device)


@dataclass(slots=True, eq=False)
class _Slot:
    """Buffer that is lent repeatedly."""

    data: torch.Tensor
    is_lent: bool = True
    last: tuple[int, int] | None = None
    """`(channel, number)` of the last collective that reads it."""


class SharedMemory:
    """Buffers in this rank's arena, either lent repeatedly or kept. Only `map_shards` involves other
    ranks."""

    def __init__(self, counters: BarrierCounters, arena: Arena, peers: dict[int, PeerArena]) -> None:
        self._counters = counters
        self.arena = arena
        self.peers = peers
        self._slots: list[_Slot] = []
        self._mapped: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()
        """Mappings of all ranks' shards, by address."""

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of zeros that the other ranks can read; release it with `give_back`."""
        num_bytes = numel * dtype.itemsize
        slot = self._idle_slot(num_bytes, seconds=0.0) or self._idle_slot(
            num_bytes, seconds=_PATIENCE_SECONDS
        )
        if slot is None:
            if num_bytes >= _SMALL_BYTES:
                self._drop_idle_slots()
            slot = _Slot(self.arena.zeros(num_bytes, torch.uint8))
            self._slots.append(slot)
        else:
            slot.data.zero_()
            slot.is_lent, slot.last = True, None
        return slot.data.view(dtype)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Take back a tensor from `borrow`; other tensors are ignored."""
        slot = self._slot_of(tensor)
        if slot is not None:
            slot.is_lent = False

    def keep(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of zeros that the other ranks can read and that stays allocated."""
        return self.arena.zeros(numel, dtype)

    def drop(self, tensor: torch.Tensor) -> None:
        """Free the memory of a tensor from `keep`. No rank may use it any more."""
        self.arena.free(tensor)

    def map_shards(self, shard: torch.Tensor) -> mmap.mmap | None:
        """Map the shards of all ranks (from `keep`) one after the other with `map_in_a_row`. Collective.

        Returns None, on every rank, if shards are not whole pages or a rank may not have more mappings.
        """
        world_size = len(self.peers) + 1
        if shard.nbytes % mmap.PAGESIZE:
            return None
        mine = self.arena.offset_of(shard)
        assert mine is not None  # from `keep`
        number = self._counters.start(GATHERS, mine)
        self._counters.arrive(GATHERS, number, "the mapping of shards")
        parts = [(self._fd(rank), self._counters.offset(GATHERS, number, rank)) for rank in range(world_size)]
        pages = None
        if (len(self._mapped) + 1) * world_size <= most_mappings():
            with suppress(OSError):
                pages = map_in_a_row(parts, shard.nbytes)
        self._counters.finish(GATHERS, number)
        vote = self._counters.start(GATHERS, int(pages is not None))
        self._counters.arrive(GATHERS, vote, "the mapping of shards")
        agreed = all(self._counters.offset(GATHERS, vote, rank) for rank in range(world_size))
        self._counters.finish(GATHERS, vote)
        if pages is None or not agreed:
            return None
        self._mapped[torch.frombuffer(pages, dtype=torch.uint8).data_ptr()] = pages
        return pages

    def mapping_of(self, tensor: torch.Tensor) -> mmap.mmap | None:
        """Return the mapping from `map_shards` that a tensor fills, or None."""
        pages = self._mapped.get(tensor.data_ptr())
        return pages if pages is not None and len(pages) == tensor.nbytes else None

    def lend_to(self, tensor: torch.Tensor, channel: int, number: int) -> None:
        """Record that a collective reads the tensor from now on."""
        slot = self._slot_of(tensor)
        if slot is not None:
            slot.last = (channel, number)

    def _fd(self, rank: int) -> int:
        return self.arena.fd if rank == self._counters.rank else self.peers[rank].fd

    def _slot_of(self, tensor: torch.Tensor) -> _Slot | None:
        address = tensor.data_ptr()
        return next((slot for slot in self._slots if slot.data.data_ptr() == address), None)

    def _idle_slot(self, num_bytes: int, *, seconds: float) -> _Slot | None:
        """Return a free slot of that size that no rank reads any more, or None; waits up to `seconds` per
        slot."""
        for slot in self._slots:
            if not slot.is_lent and slot.data.numel() == num_bytes and self._is_read(slot, seconds=seconds):
                return slot
        return None

    def _is_read(self, slot: _Slot, *, seconds: float) -> bool:
        return slot.last is None or self._counters.wait_for_readers(*slot.last, seconds=seconds)

    def _drop_idle_slots(self) -> None:
        idle = [slot for slot in self._slots if not slot.is_lent and slot.data.numel() >= _SMALL_BYTES]
        for slot in [slot for slot in idle if self._is_read(slot, seconds=0.0)]:
            self._slots.remove(slot)
            self.arena.free(slot.data)


@cache
def most_mappings() -> int:
    """Return the limit of mappings for shards: half of what the system allows a process, which needs others
    too."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/sys/vm/max_map_count").read_text()) // 2
    return 1 << 15
