"""Random seeds and deterministic kernels: settings that are equal for two runs with the same bits, and seeds
that differ per rank."""

from __future__ import annotations

import random
import warnings

import numpy as np
import torch

_RANK_STRIDE = 1_000_003


def seed_everything(seed: int, rank: int | None = None) -> None:
    """Seed Python, NumPy and torch: the same on every rank without `rank`, different on each rank with it."""
    value = (seed if rank is None else seed + _RANK_STRIDE * (rank + 1)) % 2**32
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def choose_deterministic_kernels() -> None:
    """Prefer kernels that give the same bits each time; an operation without such a kernel runs as it is."""
    # torch.use_deterministic_algorithms() first imports the compiler stack: 1.5 s and 60 MB without any use
    # here.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    # Filling every new tensor with NaN is for finding bugs; it costs a pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
