"""Examples and training scripts that take minutes on two cores, and run where a variable asks for them."""

from __future__ import annotations

import os

import pytest

VARIABLE = "ZEROTRAIN_TEST_EXAMPLES"


def runs_all_examples() -> bool:
    """Return whether every example runs here, and every training script in every tier."""
    return os.environ.get(VARIABLE) == "all"


ON_REQUEST = pytest.mark.skipif(
    not runs_all_examples(),
    reason=f"THESE EXAMPLES ARE NOT RUN HERE: minutes on two cores; set {VARIABLE}=all",
)
"""Mark of a test, or of a row of one, that runs where all examples do."""
