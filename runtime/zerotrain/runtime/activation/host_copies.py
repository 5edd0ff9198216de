"""Copies of checkpointed inputs between a GPU and host memory, on a stream beside the one that computes.

[Note: inputs on their way] An input leaves while its part runs forward, and the computation waits for the
copy at the part's end: from then on the script may write into the input, and its memory may be used again.
In backward, a part's inputs begin to come back when the part after it is recomputed, so they arrive beside
a recomputation and a backward pass. One stream copies both ways, so that what comes back has left before,
and what leaves does not overwrite what is still being read. Memory that arrives is allocated for that stream,
which waits for the computation before it writes: so an input may be dropped at any time, used or not.

Where inputs are computed in host memory there are no such copies.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from zerotrain.runtime.comm.streams import event_behind

Arriving = tuple[torch.Tensor, Any]
"""A tensor on the GPU, and the event after which it has its contents."""


class HostCopies:
    """The copies of one GPU; see [Note: inputs on their way]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._leaving: list[tuple[torch.Tensor, Any]] = []
        """Inputs of parts that run forward, and the events behind their copies."""

    def end_part(self) -> None:
        """Make the computation wait until all inputs have left."""
        for _, event in self._leaving:
            self._current.wait_event(event)
        self._leaving.clear()

    @torch.no_grad()
    def send(self, source: torch.Tensor, slot: torch.Tensor) -> None:
        """Start to copy a tensor of the GPU into page-locked memory."""
        self._wait_for_compute()
        with torch.cuda.stream(self._stream):
            slot.copy_(source, non_blocking=True)
        self._leaving.append((source, event_behind(self._stream)))

    @torch.no_grad()
    def fetch(self, slot: torch.Tensor) -> Arriving:
        """Start to copy a slot back into new memory."""
        self._wait_for_compute()
        with torch.cuda.stream(self._stream):
            tensor = torch.empty_like(slot, device=self._device)
            tensor.copy_(slot, non_blocking=True)
        return tensor, event_behind(self._stream)

    def arrived(self, arriving: Arriving) -> torch.Tensor:
        """Return the tensor, for use on the current stream, which waits for it."""
        tensor, event = arriving
        self._current.wait_event(event)
        return tensor

    @property
    def _current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def _wait_for_compute(self) -> None:
        self._stream.wait_event(event_behind(self._current))


def copies_of(device: torch.device) -> HostCopies | None:
    """Return the copies of a device; None if it computes in host memory."""
    return _made(device) if device.type == "cuda" else None


@cache
def _made(device: torch.device) -> HostCopies:
    return HostCopies(device)
