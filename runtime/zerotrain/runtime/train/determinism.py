"""Seeds and threads: what must be equal for two runs to give the same bits, and what must differ per rank."""

from __future__ import annotations

import math
import os
import random
import warnings
from pathlib import Path

import numpy as np
import torch

CGROUP = Path("/sys/fs/cgroup")

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


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores by affinity, and by the container's CPU limit where there is one (cgroup v2, else v1).

    More threads than the limit allows would only be stopped by the kernel in the middle of a step.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _cpu_limit(cgroup)
    except (OSError, ValueError):
        return cores
    return max(1, min(cores, math.ceil(quota / period)))


def _cpu_limit(cgroup: Path) -> tuple[int, int]:
    """Microseconds of CPU per period. Raises OSError or ValueError where there is no limit."""
    v2 = cgroup / "cpu.max"
    if v2.exists():
        quota, period = v2.read_text().split()
    else:
        v1 = cgroup / "cpu"
        quota, period = ((v1 / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    if int(quota) <= 0:  # v1 writes -1, v2 "max"
        raise ValueError("no CPU limit")
    return int(quota), int(period)
