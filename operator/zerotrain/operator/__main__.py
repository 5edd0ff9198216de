"""`python -m zerotrain.operator`"""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from typing import cast

_VALIDATOR = "kubernetes_validate"
_M_MMAP_THRESHOLD = -3
"""Of malloc.h."""
_LARGE_BYTES = 128 << 10
"""Where glibc begins, too, and what it raises with every larger block that is freed."""


def start() -> None:
    """Import the operator and run it in this process until SIGTERM."""
    # The kubernetes package imports this one wherever it is installed, for its dynamic client, which nobody
    # uses here: seconds of processor time in which a leader that was killed is not back yet.
    cast("dict[str, object]", sys.modules).setdefault(_VALIDATOR, None)
    _return_large_buffers()
    from zerotrain.operator.main import run

    # What is loaded stays: without this each full collection looks through all of it while every pass waits.
    gc.freeze()
    run()


def _return_large_buffers() -> None:
    """A connection has a buffer of 256 KiB that is hardly touched. glibc soon takes such blocks from its heap
    between small ones that stay: then all of it is resident, for good."""
    with suppress(AttributeError):  # a C library without that setting
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


if __name__ == "__main__":
    start()
