"""The CPU cores that a worker may use, and their division among its ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from zerotrain.runtime.launch.log import say

THREADS = "OMP_NUM_THREADS"
"""Environment variable that OpenMP reads, and so torch, NumPy and this project's native kernels."""
CGROUP = Path("/sys/fs/cgroup")


def with_threads(environ: Mapping[str, str], ranks: int, cgroup: Path = CGROUP) -> dict[str, str]:
    """Return `environ` with an equal share of the worker's cores for each of its ranks, unless it is set
    already.

    Otherwise every rank would use all cores: torch knows neither of the other ranks nor of CPU limits.
    """
    if environ.get(THREADS):
        return dict(environ)
    cores, limited = usable_cores(cgroup)
    threads = max(1, cores // ranks)
    if not limited:
        say(
            f"threads per rank: {threads} (ranks: {ranks}, cores: {cores}: all, as there is no CPU limit). "
            "Beside other pods that is too many: spec.resources.cpu gives a worker cores of its own, "
            f"{THREADS} a rank its number of threads"
        )
    return {**environ, THREADS: str(threads)}


def usable_cores(cgroup: Path = CGROUP) -> tuple[int, bool]:
    """Return the number of cores by affinity, and by the container's CPU limit where there is one (cgroup v2,
    else v1); and whether there is such a limit.

    The kernel would only throttle more threads than the limit allows in the middle of a step.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _cpu_limit(cgroup)
    except (OSError, ValueError):
        return cores, False
    return max(1, min(cores, math.ceil(quota / period))), True


def _cpu_limit(cgroup: Path) -> tuple[int, int]:
    """Return microseconds of CPU per period, and the period. Raises OSError or ValueError where there is no
    limit."""
    v2 = cgroup / "cpu.max"
    if v2.exists():
        quota, period = v2.read_text().split()
    else:
        v1 = cgroup / "cpu"
        quota, period = ((v1 / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    if int(quota) <= 0:  # v1 writes -1, v2 "max"
        raise ValueError("no CPU limit")
    return int(quota), int(period)
