"""The random number generators of one rank as tensors and JSON, so that a resumed run draws the same numbers.

Covers python's `random`, numpy's legacy generator when numpy is loaded, and torch on the host and on the GPU
on which the rank computes, whichever of the host's GPUs that is. No pickle: states are arrays of integers.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

PREFIX = "rng/"
_PYTHON_WORDS = 625


def capture() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return `(tensors, scalars)` of this process, without drawing numbers. Tensor keys start with `rng/`."""
    version, words, gauss = random.getstate()
    tensors = {"rng/python": torch.tensor(words, dtype=torch.int64), "rng/torch": torch.get_rng_state()}
    scalars: dict[str, Any] = {"python_version": version, "python_gauss": gauss}
    if "numpy" in sys.modules:
        import numpy as np

        state = np.random.get_state(legacy=False)
        tensors["rng/numpy"] = torch.from_numpy(state["state"]["key"].astype("int64"))
        scalars |= {
            "numpy_position": int(state["state"]["pos"]),
            "numpy_has_gauss": int(state["has_gauss"]),
            "numpy_gauss": float(state["gauss"]),
        }
    if torch.cuda.is_available():
        tensors["rng/cuda"] = torch.cuda.get_rng_state(torch.cuda.current_device())
    return tensors, scalars


def restore(tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> None:
    """Set this process's generators to a captured state. Raises ValueError when a part is malformed."""
    words = tensors["rng/python"].tolist()
    if len(words) != _PYTHON_WORDS:
        raise ValueError(f"rng/python holds {len(words)} words instead of {_PYTHON_WORDS}")
    random.setstate((int(scalars["python_version"]), tuple(words), scalars["python_gauss"]))
    if "rng/numpy" in tensors:
        import numpy as np

        np.random.set_state(
            (
                "MT19937",
                tensors["rng/numpy"].numpy().astype("uint32"),
                int(scalars["numpy_position"]),
                int(scalars["numpy_has_gauss"]),
                float(scalars["numpy_gauss"]),
            )
        )
    torch.set_rng_state(tensors["rng/torch"])
    if torch.cuda.is_available() and "rng/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng/cuda"], torch.cuda.current_device())
