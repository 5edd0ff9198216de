"""Streams of a device, as far as collectives and what follows them use others than the current one.

On a CPU there are none: the classes here then do nothing, and everything runs where it is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class ComputeStream:
    """The stream on which something was computed."""

    stream: Any
    """Stream of torch; None on a CPU."""

    @classmethod
    def current(cls, device: torch.device) -> ComputeStream:
        """Return the device's current stream."""
        return cls(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Run the block on this stream, and make the current one wait for it, if it is another."""
        current = None if self.stream is None else torch.cuda.current_stream(self.stream.device)
        if current is None or current == self.stream:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)
