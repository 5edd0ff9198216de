"""An all-to-all of gradients in flight, independent of the transport; made by `Comm.start_exchange`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zerotrain.runtime.comm.timing import Pending


class Exchange:
    """Handle of an all-to-all: call `wait`, read `parts`, call `finish`, in this order and once each."""

    def __init__(
        self,
        pending: Pending,
        *,
        parts: Callable[[], Sequence[torch.Tensor]],
        finish: Callable[[], None],
        extra_bytes: int,
    ) -> None:
        self.wait = pending.wait
        """Block (CPU) or make the current stream wait (CUDA) until the parts are available."""
        self.parts = parts
        """Return what every rank sent to this one, in rank order. Read only; one of the parts may alias the
        buffer that was sent."""
        self.finish = finish
        """Declare that the parts have been read and are not needed any more."""
        self.extra_bytes = extra_bytes
        """Bytes that the received parts take until `finish`; 0 if they are read in place on the other
        ranks."""
