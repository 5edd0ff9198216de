"""Copies of weights from host memory to their place on the device, beside what the device computes.

Called by `params.py`. On a CPU there is nothing to overlap: the copy is made at once.
"""

from __future__ import annotations

from typing import Any

import torch

from zerotrain.runtime.comm.timing import Pending
from zerotrain.runtime.zero.shards import StartGather


class Uploads:
    """The copies of one engine, in order, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def send(self, source: torch.Tensor, part: torch.Tensor, start: StartGather) -> Pending:
        """Copy page-locked `source` to `part` and start the gather from there. `source` must stay as it is
        until `finish`, or until an event of `mark` has passed."""
        if self._stream is None:
            part.copy_(source)
            return start(part)
        # `part` is memory that the computation used until now, and its allocator may hand out again.
        self._stream.wait_stream(torch.cuda.current_stream(part.device))
        with torch.cuda.stream(self._stream):
            part.copy_(source, non_blocking=True)
            pending = start(part)
            arrived = self.mark()

        def wait() -> None:
            torch.cuda.current_stream(part.device).wait_event(arrived)
            pending.wait()

        return Pending(wait)

    def mark(self) -> Any:
        """An event that has passed when all copies so far are done; None where they are already."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def finish(self) -> None:
        """Wait until all copies so far are done."""
        if self._stream is not None:
            self._stream.synchronize()
