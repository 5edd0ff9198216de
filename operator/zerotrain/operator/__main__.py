"""Run the operator: `python -m zerotrain.operator`."""

from __future__ import annotations

import gc
import sys
from typing import cast


def start() -> None:
    """Import the operator and run it in this process until SIGTERM."""
    # The kubernetes package imports this module wherever it is installed, as in the development environment
    # and its image, for a dynamic client that the operator does not use. That costs 1.2 s of processor time,
    # in which a leader that was killed is not replaced, and 22 MiB. The package has no switch for it.
    cast("dict[str, object]", sys.modules).setdefault("kubernetes_validate", None)
    from zerotrain.operator.controller.kopf_process import run

    # Loaded modules stay: without this call, each full collection scans all of them while every pass waits.
    gc.freeze()
    run()


if __name__ == "__main__":
    start()
