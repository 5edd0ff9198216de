"""`python -m zerotrain.operator`"""

from __future__ import annotations

import gc
import sys
from typing import cast

_VALIDATOR = "kubernetes_validate"


def start() -> None:
    """Import the operator and run it in this process until SIGTERM."""
    # The kubernetes package imports this one wherever it is installed, for its dynamic client, which nobody
    # uses here: seconds of processor time in which a leader that was killed is not back yet.
    cast("dict[str, object]", sys.modules).setdefault(_VALIDATOR, None)
    from zerotrain.operator.main import run

    # What is loaded stays: without this each full collection looks through all of it while every pass waits.
    gc.freeze()
    run()


if __name__ == "__main__":
    start()
