"""All tiers and phases of one rank together."""

from __future__ import annotations

from dataclasses import dataclass

from .gpu import FreedSums, GpuPersistent, GpuTransient, freed_sums, gpu_persistent, gpu_transient
from .inputs import MemoryInputs
from .tiers import HostBytes, StepTraffic, disk_bytes, host_bytes, step_traffic


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBreakdown:
    """All bytes that one rank needs."""

    inputs: MemoryInputs
    gpu: GpuPersistent
    freed: FreedSums
    """Part of `gpu` that does not exist all the time."""
    transient: GpuTransient
    host: HostBytes
    disk_bytes: int
    """Encrypted spill."""
    traffic: StepTraffic


def breakdown(inputs: MemoryInputs) -> MemoryBreakdown:
    """Return all tiers and phases of one rank, in bytes."""
    return MemoryBreakdown(
        inputs=inputs,
        gpu=gpu_persistent(inputs),
        freed=freed_sums(inputs),
        transient=gpu_transient(inputs),
        host=host_bytes(inputs),
        disk_bytes=disk_bytes(inputs),
        traffic=step_traffic(inputs),
    )
