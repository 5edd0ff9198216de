"""Metrics of a rank that are states, not events: read when a snapshot is sent, not at every step.

Memory by tier and phase, the spill's volumes, the GPU, facts of the engine. Called by the reporter.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from zerotrain.runtime.engine import Engine
from zerotrain.runtime.facade.memory import resident_peak_bytes
from zerotrain.runtime.kernels.device import Family, on_device
from zerotrain.runtime.metrics import OffloadSample, WorkerMetrics
from zerotrain.runtime.step import StepResult
from zerotrain.runtime.zero.ledger import MemoryKind, Tier

ENGINE_PHASES = ("forward", "backward", "reduce", "optimizer", "gather")
"""Phases in `StepResult.seconds` that do not overlap."""

RECORD_LABEL = "step record"
"""Label of the gathers that exchange a few numbers (`Comm.gather_record`)."""


def phases_of(seconds: Mapping[str, float], data_seconds: float | None) -> dict[str, float]:
    """Return a step's phases under the names of the metrics; the gathering of weights counts as part of the
    optimizer."""
    data = {} if data_seconds is None else {"data": data_seconds}
    known = {name: seconds[name] for name in ("forward", "backward", "reduce") if name in seconds}
    optimizer = seconds.get("optimizer", 0.0) + seconds.get("gather", 0.0)
    return {**data, **known, "optimizer": optimizer}


def facts_of(engine: Engine) -> dict[str, str]:
    """Return the labels of zerotrain_rank_info that are known once the engine exists."""
    zero = engine.config.zero
    offloaded = {block.device for block in (zero.offload_optimizer, zero.offload_param) if block is not None}
    facts = {
        "transport": engine.comm.transport,
        "zero_stage": str(zero.stage),
        "dtype": engine.config.precision.compute_dtype,
        "offload": next((tier for tier in ("nvme", "cpu") if tier in offloaded), "none"),
        "version": _version(),
        "gpu_uuid": "",
        "gpu_name": "",
    }
    if engine.device.type == "cuda":
        properties = torch.cuda.get_device_properties(engine.device)
        # the notation of DCGM and nvidia-smi
        facts |= {"gpu_uuid": f"GPU-{properties.uuid}", "gpu_name": properties.name}
    return facts


def set_plan_of_memory(metrics: WorkerMetrics, engine: Engine) -> None:
    """Set the planned memory according to the byte formulas, with which the peaks are compared."""
    status, tiers = engine.memory_status(), _tier_names(engine)
    planned = dict.fromkeys(tiers.values(), 0)
    planned[tiers[Tier.DEVICE]] += status.planned_peak_bytes
    planned[tiers[Tier.HOST]] += status.planned_host_bytes
    planned[tiers[Tier.DISK]] += status.planned_disk_bytes
    for tier, num_bytes in planned.items():
        metrics.set("zerotrain_memory_planned_bytes", num_bytes, tier)


def set_spill(metrics: WorkerMetrics, engine: Engine) -> None:
    """Set the metrics of how states are spilled, for the alert on unencrypted bytes."""
    info = engine.spill_info
    if info is not None:
        metrics.set_spill(
            engine=info.engine,
            direct=info.is_direct,
            encryption="None" if info.encryption == "None" else "AEAD",
            backend=info.backend,
            reason=info.reasons,
        )


def set_kernels(metrics: WorkerMetrics, engine: Engine) -> None:
    """Set which of our CUDA kernels the rank uses."""
    if engine.device.type == "cuda":
        kernels = on_device(engine.device)
        for family in Family:
            metrics.set("zerotrain_gpu_kernels_in_use", kernels.of(family) is not None, family.value)


def set_fp8(metrics: WorkerMetrics, engine: Engine) -> None:
    """Set the magnitudes of the last products in FP8. Waits for the device."""
    if engine.core.fp8 is not None:
        for operand, found in engine.core.fp8.ranges().items():
            metrics.set("zerotrain_fp8_amax", found.amax, operand.name.lower())
            metrics.set("zerotrain_fp8_overflow_ratio", found.overflow_ratio, operand.name.lower())


def probe_spill(metrics: WorkerMetrics, engine: Engine) -> float | None:
    """Return the bytes per second that the drive reaches while no step waits for it, the reference for later
    passes. None without a spill."""
    rate = engine.probe_spill()
    if rate is not None:
        metrics.set("zerotrain_spill_calibrated_bytes_per_second", rate)
    return rate


def measure(metrics: WorkerMetrics, engine: Engine) -> None:
    """Set all metrics that are read for a snapshot."""
    set_offload(metrics, engine)
    drain_collectives(metrics, engine)
    metrics.set_dropped_points(engine.monitor.dropped)
    set_fp8(metrics, engine)
    resident = _resident_bytes()
    metrics.set("zerotrain_process_resident_bytes", resident)
    # The kernel counts both per thread and adds them up at intervals.
    metrics.set("zerotrain_process_resident_peak_bytes", max(resident, resident_peak_bytes()))
    for (tier, phase), num_bytes in _peaks(engine).items():
        metrics.set("zerotrain_memory_peak_bytes", num_bytes, tier, phase)
    if engine.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(engine.device)
        metrics.set("zerotrain_gpu_memory_used_bytes", total - free)
        metrics.set("zerotrain_gpu_memory_total_bytes", total)
        peak = torch.cuda.max_memory_allocated(engine.device)
        metrics.set("zerotrain_gpu_memory_allocated_peak_bytes", peak)
    with suppress(OSError):  # a volume that is gone has no size
        space = engine.spill_space()
        if space is not None:
            metrics.set("zerotrain_spill_free_bytes", space.free)
            metrics.set("zerotrain_spill_capacity_bytes", space.capacity)
            metrics.set("zerotrain_spill_file_bytes", engine.memory.live_bytes(MemoryKind.SPILL))


def set_offload(metrics: WorkerMetrics, engine: Engine) -> None:
    """Set the totals of offloading so far; also after the spill was lost."""
    zero = engine.config.zero
    if zero.offload_optimizer is None and zero.offload_param is None:
        return
    totals = engine.offload_totals()
    metrics.set_offload(
        OffloadSample(
            moved_bytes={
                "h2d": totals.h2d_bytes,
                "d2h": totals.d2h_bytes,
                "spill_read": totals.spill_read_bytes,
                "spill_write": totals.spill_written_bytes,
            },
            wait_seconds=totals.spill_wait_seconds,
            pass_seconds=totals.spill_pass_seconds,
            pass_bytes=totals.spill_pass_bytes,
            io_errors=totals.spill_io_errors,
            auth_failures=totals.spill_auth_failures,
        )
    )


def drain_collectives(metrics: WorkerMetrics, engine: Engine) -> None:
    """Record the collectives that finished since the last call. Step records are counted apart: they last as
    long as the slowest rank, and say nothing about the network."""
    timings = engine.comm.timings
    seconds: dict[str, list[float]] = {}
    sent: dict[str, int] = {}
    for _ in range(len(timings)):  # a thread may add some meanwhile
        sample = timings.popleft()
        op = "record" if sample.label == RECORD_LABEL else sample.op
        seconds.setdefault(op, []).append(sample.seconds)
        sent[op] = sent.get(op, 0) + sample.num_bytes
    for op, values in seconds.items():
        metrics.observe_collectives(op, values, sent[op])


def wait_of(result: StepResult) -> float:
    """Return the seconds of the step in which this rank only waited for collectives."""
    wait = result.seconds.get("wait", 0.0)
    return wait if math.isfinite(wait) else 0.0


def _peaks(engine: Engine) -> dict[tuple[str, str], int]:
    """Return peak bytes by tier and phase. On a CPU the device is the host: there the peak of their sum is
    reported, not the sum of two peaks of different moments."""
    tiers = _tier_names(engine)
    peaks = {
        (tiers[tier], phase): num_bytes for (phase, tier), num_bytes in engine.memory.tier_peaks().items()
    }
    if tiers[Tier.DEVICE] == tiers[Tier.HOST]:
        peaks |= {("cpu", phase): num_bytes for phase, num_bytes in engine.memory.phase_peaks().items()}
    return {key: num_bytes for key, num_bytes in peaks.items() if key[1] in _PHASES}


_PHASES = frozenset({"start", "forward", "backward", "step"})


def _tier_names(engine: Engine) -> dict[Tier, str]:
    on_cuda, zero = engine.device.type == "cuda", engine.config.zero
    blocks = [block for block in (zero.offload_optimizer, zero.offload_param) if block is not None]
    # The states themselves, most of the memory where it has them, are not page-locked.
    has_states = zero.offload_optimizer is not None and zero.offload_optimizer.device == "cpu"
    is_pinned = on_cuda and not has_states and any(block.pin_memory for block in blocks)
    return {
        Tier.DEVICE: "gpu" if on_cuda else "cpu",
        Tier.HOST: "pinned" if is_pinned else "cpu",
        Tier.DISK: "nvme",
    }


def _resident_bytes() -> int:
    """Return the resident size from statm: for smaps the kernel walks all pages."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def _version() -> str:
    try:
        return version("zerotrain")
    except PackageNotFoundError:  # run from a source tree
        return ""
