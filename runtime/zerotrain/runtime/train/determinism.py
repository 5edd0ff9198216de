"""Seeds and threads: what must be equal for two runs to give the same bits, and what must differ per rank."""

from __future__ import annotations

import math
import os
import random
import warnings
from pathlib import Path

import numpy as np
import torch

CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")

_RANK_STRIDE = 1_000_003


def seed_everything(seed: int, rank: int | None = None) -> None:
    """Seed python, numpy and torch; the same on every rank without `rank`, different on each with it."""
    value = (seed if rank is None else seed + _RANK_STRIDE * (rank + 1)) % 2**32
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def choose_deterministic_kernels() -> None:
    """Prefer kernels that give the same bits each time; one without such a kernel is used as it is."""
    # torch.use_deterministic_algorithms() first imports the compiler stack: 1.5 s and 60 MB for nothing here.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    # Filling every new tensor with NaN is for finding bugs; it costs a pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")


def set_threads(local_world_size: int) -> int:
    """Give this rank its share of the container's cores; OMP_NUM_THREADS wins. Returns threads."""
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, usable_cores() // local_world_size))
    return torch.get_num_threads()


def usable_cores(cpu_max: Path = CGROUP_CPU) -> int:
    """Cores by affinity, and by the container's CPU limit where there is one."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()
        return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores
