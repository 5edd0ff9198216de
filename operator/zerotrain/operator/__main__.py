"""Run the operator: `python -m zerotrain.operator`."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from typing import cast

_VALIDATOR = "kubernetes_validate"
_M_MMAP_THRESHOLD = -3
"""Value of `M_MMAP_THRESHOLD` in malloc.h."""
_LARGE_BYTES = 128 << 10
"""Smallest block that glibc maps separately. It is glibc's initial value, which glibc by itself raises with
every larger block that is freed."""


def start() -> None:
    """Import the operator and run it in this process until SIGTERM."""
    # The kubernetes package imports this module wherever it is installed, for its dynamic client. The
    # operator does not use that client, and the import takes seconds of processor time, which delay the
    # replacement of a leader that was killed.
    cast("dict[str, object]", sys.modules).setdefault(_VALIDATOR, None)
    _return_large_buffers()
    from zerotrain.operator.main import run

    # Loaded modules stay: without this call, each full collection scans all of them while every pass waits.
    gc.freeze()
    run()


def _return_large_buffers() -> None:
    """Keep large buffers out of the heap of malloc. A connection has a buffer of 256 KiB that is hardly
    touched. Without a fixed threshold, glibc soon takes such blocks from its heap, between small ones that
    stay: then all of the heap is resident for good."""
    with suppress(AttributeError):  # a C library without that setting
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


if __name__ == "__main__":
    start()
