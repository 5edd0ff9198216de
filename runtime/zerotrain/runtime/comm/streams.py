"""Streams of a device, as far as collectives and what follows them use others than the current one.

On a CPU there are none: the classes here then do nothing, and everything runs where it is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from zerotrain.runtime.comm.timing import Pending, Stopwatch


def event_behind(stream: Any) -> Any:
    """Return an event that has passed when the stream has done all that was issued to it so far; None without
    a stream, as on a CPU."""
    if stream is None:
        return None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class HostCopy:
    """A small tensor on its way to the host. Making it waits for nothing; reading waits for what the stream
    had been given by then, and for nothing behind that."""

    __slots__ = ("_event", "_values")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Start the copy on the current stream. On a CPU there is none, and the tensor must not change."""
        tensor = tensor.detach()  # a copy with a history would keep the graph of what it copies
        self._values, self._event = tensor, None
        if tensor.device.type == "cuda":
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = event_behind(torch.cuda.current_stream(tensor.device))

    def read(self) -> torch.Tensor:
        """Return the values in host memory, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values


class ComputeStream(NamedTuple):
    """The stream on which something was computed."""

    stream: Any
    """Stream of torch; None on a CPU."""

    @classmethod
    def current(cls, device: torch.device) -> ComputeStream:
        """Return the device's current stream."""
        return cls(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    def wait(self, pending: Pending) -> None:
        """Make this stream wait for a collective, and the current one for this stream, if it is another."""
        current = None if self.stream is None else torch.cuda.current_stream(self.stream.device)
        if current is None or current == self.stream:
            pending.wait()
            return
        with torch.cuda.stream(self.stream):
            pending.wait()
        current.wait_stream(self.stream)


def keep_for_current(tensor: torch.Tensor) -> None:
    """Tell a GPU's allocator that the current stream reads the tensor, which was made on another one: its
    memory is not used again before both are done with it."""
    if (stream := ComputeStream.current(tensor.device).stream) is not None:
        tensor.record_stream(stream)


class SideStream:
    """A stream beside the one that computes, for reductions: it waits for exchanges, and sums what arrives.

    [Note: memory of two streams] The allocator gives freed memory to the stream that allocated it, at once.
    What the computation made and an exchange sends must therefore not be freed before the computation waits
    for that exchange (`wait_for`). What an exchange receives is allocated here and read here alone, so it can
    be freed as soon as its last reader was launched.
    """

    def __init__(self, device: torch.device, stopwatch: Stopwatch, *, is_needed: bool = True) -> None:
        """Create the stream of a CUDA device if it `is_needed`: with one rank nothing is exchanged, and parts
        are what the computation made. `stopwatch` measures how long the computation waits."""
        self._stopwatch = stopwatch
        self._stream: Any = None
        if device.type == "cuda" and is_needed:
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._is_ahead = False

    @property
    def is_apart(self) -> bool:
        """Whether there is another stream than the current one, so that waits in `running` block nobody."""
        return self._stream is not None

    def mark(self) -> Any:
        """Return an event at this place of the current stream; None on a CPU."""
        if self._stream is None:
            return None
        return event_behind(torch.cuda.current_stream(self._stream.device))  # another GPU may be current

    @contextmanager
    def running(self, *, after: Any = None) -> Iterator[None]:
        """Run the block on this stream, once the event `after` has passed."""
        if self._stream is None:
            yield
            return
        if after is not None:
            self._stream.wait_event(after)
        self._is_ahead = True
        with torch.cuda.stream(self._stream), self._stopwatch.aside():
            yield

    def wait_for(self, event: Any) -> None:
        """Make the current stream wait for an event of this one."""
        if event is not None:
            with self._stopwatch.waiting():
                torch.cuda.current_stream(self._stream.device).wait_event(event)

    def join(self) -> None:
        """Make the current stream wait for all that ran here, if anything did since the last call."""
        if self._is_ahead:
            self._is_ahead = False
            with torch.cuda.stream(self._stream):
                event = self.mark()
            self.wait_for(event)
