"""Buffers of equal slots, so that long-lived inputs do not fragment the memory of short-lived tensors.

A slot is free again when nothing refers to it any more, in whatever order backward frees the graph.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from zerotrain.contract.memory.slots import next_buffer

ALIGN_BYTES = 64
"""Alignment of slots in bytes, as of torch's own CPU tensors, so that kernels take the same code path."""

Key = tuple[int, torch.dtype, torch.device, bool]


@dataclass(eq=False, slots=True, weakref_slot=True)
class ActivationSlot:
    """One slot of a buffer; `tensor` is 1-D."""

    tensor: torch.Tensor


class ActivationArena:
    """Slots by number of elements, dtype, device and pinning."""

    def __init__(self, num_slots: int | None = None) -> None:
        """`num_slots` is the number of slots per buffer; None starts small and doubles."""
        self._num_slots = num_slots
        self._free: dict[Key, list[torch.Tensor]] = {}
        self._num_made: dict[Key, int] = {}

    def take(self, numel: int, *, dtype: torch.dtype, device: torch.device, pinned: bool) -> ActivationSlot:
        """Return a slot with undefined contents."""
        key = (numel, dtype, device, pinned)
        free = self._free.setdefault(key, [])
        if not free:
            free.extend(reversed(self._make(key)))
        place = free.pop()
        slot = ActivationSlot(place)
        weakref.finalize(slot, free.append, place).atexit = False
        return slot

    def _make(self, key: Key) -> list[torch.Tensor]:
        numel, dtype, device, pinned = key
        made = self._num_made.get(key, 0)
        count = next_buffer(made, self._num_slots)
        self._num_made[key] = made + count
        stride = -(-numel * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES // dtype.itemsize
        buffer = torch.empty(count * stride, dtype=dtype, device=device, pin_memory=pinned)
        return [buffer[index * stride :][:numel] for index in range(count)]
