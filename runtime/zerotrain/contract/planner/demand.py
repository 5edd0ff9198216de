"""Demand of one job on every tier, compared with its limits, by rank, worker and phase, with a verdict.

The engine's part comes from the byte formulas that the engine checks itself against (`contract.memory`). All
other parts are estimates and are kept separate, up to the table that users read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from zerotrain.contract.config import EngineConfig
from zerotrain.contract.memory import MemoryBreakdown, breakdown, memory_inputs

from .activations import Activations, activations
from .shape import ModelShape

MIB = 1 << 20
GIB = 1 << 30

DEVICE_CONTEXT_BYTES = 640 * MIB
"""Driver context, kernels and libraries' work space on an accelerator."""
DEVICE_CHANNEL_BYTES = 640 * MIB
"""Buffers of NCCL's channels, with several ranks."""
DEVICE_FRAGMENT_PART = 0.04
"""Fraction that the caching allocator holds beyond the memory in use."""
PROCESS_BYTES = 400 * MIB
"""Interpreter, torch and data loader of a rank on CPUs."""
DEVICE_PROCESS_BYTES = 2 * GIB
"""Interpreter, torch and data loader beside an accelerator, whose libraries are larger."""
LAUNCHER_BYTES = 64 * MIB
HEAP_PART = 0.05
"""Fraction of freed activations that the C library's heap keeps."""
FILE_SYSTEM_PART = 0.05
"""Fraction of a volume that its file system takes."""
TIGHT_PART = 0.05
"""Fraction of the limit below which a margin is tight."""

ESTIMATES = (
    f"accelerator: {DEVICE_CONTEXT_BYTES // MIB} MiB of driver context, {DEVICE_CHANNEL_BYTES // MIB} MiB of "
    f"NCCL with several ranks, {DEVICE_FRAGMENT_PART:.0%} of the allocator's fragments",
    f"host: {PROCESS_BYTES // MIB} MiB a rank on CPUs and {DEVICE_PROCESS_BYTES // GIB} GiB beside a GPU, "
    f"{LAUNCHER_BYTES // MIB} MiB of the launcher; on CPUs {HEAP_PART:.0%} of heap",
    f"nvme: {FILE_SYSTEM_PART:.0%} of the volume for its file system",
)
"""Estimates beside activations. They are not measured, so they may be off by a factor."""


class Fit(StrEnum):
    """Verdict on a plan, ordered from best to worst by `_ORDER`."""

    FITS = "Fits"
    UNKNOWN = "Unknown"
    """A limit, or the model's size, is not known."""
    TIGHT = "Tight"
    """The job fits only if the estimates err on the safe side."""
    DOES_NOT_FIT = "DoesNotFit"
    """The job does not fit even without any estimate."""


_ORDER = tuple(Fit)


def worst(verdicts: list[Fit]) -> Fit:
    return max(verdicts, key=_ORDER.index, default=Fit.UNKNOWN)


class Tier(StrEnum):
    GPU = "gpu"
    HOST = "host"
    PINNED = "pinned"
    """Page-locked part of the host memory."""
    SHARED = "shared"
    """Part of the host memory that the ranks of a worker share."""
    NVME = "nvme"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Available amount of a tier."""

    num_bytes: int
    source: str
    """Field or option that sets it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model, a configuration and the workers they run on."""

    shape: ModelShape
    config: EngineConfig
    ranks_per_worker: int
    on_host: bool
    """Whether the job trains on the workers' CPUs."""
    is_encrypted: bool = True
    limits: Mapping[Tier, Limit] = field(default_factory=dict)
    """Limits: that of the GPU per device, the others per worker."""

    @property
    def workers(self) -> int:
        return -(-self.config.world_size // self.ranks_per_worker)


@dataclass(frozen=True, kw_only=True, slots=True)
class TierDemand:
    """One tier's line of a plan; bytes of one rank for the GPU, of one worker for the others."""

    tier: Tier
    per_rank_bytes: int
    """Total for one rank."""
    exact_bytes: int
    """Allocations of the engine itself, by formula."""
    activation_bytes: int = 0
    overhead_bytes: int = 0
    """Libraries, processes, file systems: estimated."""
    least_bytes: int
    """Bytes that are needed in any case; the job is refused if even these do not fit."""
    limit: Limit | None = None
    is_enforced: bool = True
    """Whether exceeding the limit is an error; if false, the line is only information."""

    @property
    def per(self) -> str:
        """Unit to which `total_bytes` and the limit refer: a rank, which has its own GPU, or a worker."""
        return "rank" if self.tier is Tier.GPU else "worker"

    @property
    def total_bytes(self) -> int:
        return self.exact_bytes + self.activation_bytes + self.overhead_bytes

    @property
    def margin_bytes(self) -> int | None:
        return None if self.limit is None else self.limit.num_bytes - self.total_bytes

    @property
    def verdict(self) -> Fit:
        if self.total_bytes == 0:
            return Fit.FITS
        if self.limit is None or self.margin_bytes is None:
            return Fit.UNKNOWN if self.is_enforced else Fit.FITS
        if self.least_bytes > self.limit.num_bytes:
            return Fit.DOES_NOT_FIT if self.is_enforced else Fit.TIGHT
        return Fit.TIGHT if self.margin_bytes < TIGHT_PART * self.limit.num_bytes else Fit.FITS


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Memory of the compute device, and host memory beside it, in one phase of a step on one rank."""

    name: str
    engine_bytes: int
    activation_bytes: int
    host_bytes: int = 0
    """Host memory beside the device's: offloaded data, its buffers, and activations that are kept there."""
    network_bytes: int = 0
    """Payload of the collectives that the phase waits for."""

    @property
    def total_bytes(self) -> int:
        return self.engine_bytes + self.activation_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """All statements of a plan about memory."""

    workload: Workload
    formulas: MemoryBreakdown
    tiers: tuple[TierDemand, ...]
    phases: tuple[Phase, ...]

    @property
    def verdict(self) -> Fit:
        return worst([tier.verdict for tier in self.tiers])

    def tier(self, tier: Tier) -> TierDemand | None:
        return next((item for item in self.tiers if item.tier is tier), None)


def demand(workload: Workload) -> Demand:
    """Return the needs of the workload, compared with its limits."""
    config, shape = workload.config, workload.shape
    formulas = breakdown(
        memory_inputs(
            config,
            shape.units(config, on_host=workload.on_host),
            # Ranks of one pod read each other's memory; those of several pods have copies.
            shares_memory=workload.on_host and workload.workers == 1 and config.world_size > 1,
            ranks_per_node=workload.ranks_per_worker,
            on_host=workload.on_host,
            is_encrypted=workload.is_encrypted,
        )
    )
    acts = activations(shape, config)
    if not workload.on_host:
        acts = replace(acts, block_work_bytes=acts.block_work_bytes + acts.moving_bytes)
    compute = _compute(formulas, acts, shape)
    host, nvme = _host(workload, formulas, acts, compute), _nvme(workload, formulas)
    if workload.on_host:
        tiers = [host, _shared(workload, formulas), nvme]
    else:
        tiers = [_gpu(workload, compute), host, _pinned(workload, formulas, acts), nvme]
    return Demand(
        workload=workload,
        formulas=formulas,
        tiers=tuple(item for item in tiers if item.total_bytes),
        phases=_phases(formulas, acts),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compute:
    """Peak of the compute device, on one rank."""

    exact_bytes: int
    activation_bytes: int
    least_bytes: int


def _phases(formulas: MemoryBreakdown, acts: Activations) -> tuple[Phase, ...]:
    kept, extra, sent = formulas.gpu.total_bytes, formulas.transient, formulas.traffic.phases
    host = formulas.host.total_bytes
    backward, in_backward = _backward(formulas, acts)
    return (
        Phase(
            name="between steps",
            engine_bytes=kept - formulas.freed.total_bytes,
            activation_bytes=0,
            host_bytes=host,
        ),
        Phase(
            name="forward",
            engine_bytes=_forward_kept(formulas) + extra.forward_bytes,
            activation_bytes=acts.forward_bytes,
            host_bytes=host + acts.host_bytes,
            network_bytes=sent.forward_bytes,
        ),
        Phase(
            name="backward",
            engine_bytes=backward,
            activation_bytes=in_backward,
            host_bytes=host + acts.host_bytes,
            network_bytes=sent.backward_bytes,
        ),
        Phase(
            name="step",
            engine_bytes=kept + extra.step_bytes,
            activation_bytes=0,
            host_bytes=host,
            network_bytes=sent.step_bytes,
        ),
    )


def _forward_kept(formulas: MemoryBreakdown) -> int:
    """Return the persistent bytes in forward. Sums of gradients are there from the second micro-batch on."""
    freed = formulas.freed.total_bytes if formulas.inputs.micro_steps == 1 else 0
    return formulas.gpu.total_bytes - freed


def _backward(formulas: MemoryBreakdown, acts: Activations) -> tuple[int, int]:
    """Return the bytes of the engine and of activations at the start of backward, or in its last block,
    whichever are more together: sums of gradients grow while activations are freed."""
    kept, extra = formulas.gpu.total_bytes, formulas.transient.backward_bytes
    start = min(_forward_kept(formulas) + formulas.freed.largest_bytes, kept)
    return max((start + extra, acts.backward_bytes), (kept + extra, acts.last_backward_bytes), key=sum)


def _compute(formulas: MemoryBreakdown, acts: Activations, shape: ModelShape) -> _Compute:
    peak = max(_phases(formulas, acts), key=lambda phase: phase.total_bytes)
    kept, start, extra = formulas.gpu.total_bytes, _forward_kept(formulas), formulas.transient
    # Buffers of a late moment of backward and activations of its start do not exist at the same time.
    least = max(kept + extra.peak_bytes, start + extra.forward_bytes + acts.least_bytes)
    return _Compute(
        exact_bytes=peak.engine_bytes,
        activation_bytes=peak.activation_bytes,
        least_bytes=kept if shape.is_guess else least,
    )


def _gpu(workload: Workload, compute: _Compute) -> TierDemand:
    used = compute.exact_bytes + compute.activation_bytes
    overhead = DEVICE_CONTEXT_BYTES + int(DEVICE_FRAGMENT_PART * used)
    overhead += DEVICE_CHANNEL_BYTES if workload.config.world_size > 1 else 0
    return TierDemand(
        tier=Tier.GPU,
        per_rank_bytes=used + overhead,
        exact_bytes=compute.exact_bytes,
        activation_bytes=compute.activation_bytes,
        overhead_bytes=overhead,
        least_bytes=compute.least_bytes,
        limit=workload.limits.get(Tier.GPU),
    )


def _host(workload: Workload, formulas: MemoryBreakdown, acts: Activations, compute: _Compute) -> TierDemand:
    ranks = workload.ranks_per_worker
    exact, kept, overhead = formulas.host.total_bytes, acts.host_bytes, DEVICE_PROCESS_BYTES
    least = exact if workload.shape.is_guess else exact + kept
    if workload.on_host:
        exact += compute.exact_bytes
        kept += compute.activation_bytes
        overhead = PROCESS_BYTES + int(HEAP_PART * (exact + kept))
        least = formulas.host.total_bytes + compute.least_bytes
    return TierDemand(
        tier=Tier.HOST,
        per_rank_bytes=exact + kept + overhead,
        exact_bytes=ranks * exact,
        activation_bytes=ranks * kept,
        overhead_bytes=ranks * overhead + LAUNCHER_BYTES,
        least_bytes=ranks * least,
        limit=workload.limits.get(Tier.HOST),
    )


def _pinned(workload: Workload, formulas: MemoryBreakdown, acts: Activations) -> TierDemand:
    """Return the demand on page-locked memory: what a device copies from and to, so not the states."""
    host, zero = formulas.host, workload.config.zero
    states, params = zero.offload_optimizer, zero.offload_param
    locks_states = states is not None and states.pin_memory
    locks_params = params is not None and params.pin_memory
    per_rank = acts.host_bytes + (host.param_bytes if locks_params else 0)
    per_rank += host.grad_bytes if locks_states else 0
    per_rank += host.ring_bytes if locks_states or locks_params else 0
    return TierDemand(
        tier=Tier.PINNED,
        per_rank_bytes=per_rank,
        exact_bytes=workload.ranks_per_worker * per_rank,
        least_bytes=workload.ranks_per_worker * per_rank,
        limit=workload.limits.get(Tier.PINNED),
        is_enforced=False,
    )


def _shared(workload: Workload, formulas: MemoryBreakdown) -> TierDemand:
    """Return the demand on memory shared by ranks.

    Weights and gradients are in memory files that the other ranks of the worker read in place.
    """
    gpu, transient = formulas.gpu, formulas.transient
    lies_there = formulas.inputs.shares_memory
    held = gpu.param_bytes + gpu.frozen_bytes + gpu.replicated_bytes + gpu.grad_bytes
    per_rank = held + transient.peak_bytes if lies_there else 0
    return TierDemand(
        tier=Tier.SHARED,
        per_rank_bytes=per_rank,
        exact_bytes=workload.ranks_per_worker * per_rank,
        least_bytes=workload.ranks_per_worker * per_rank,
        # Unnamed memory files are charged to the worker's memory, not to /dev/shm.
        is_enforced=False,
    )


def _nvme(workload: Workload, formulas: MemoryBreakdown) -> TierDemand:
    num_bytes = workload.ranks_per_worker * formulas.disk_bytes
    return TierDemand(
        tier=Tier.NVME,
        per_rank_bytes=formulas.disk_bytes,
        exact_bytes=num_bytes,
        overhead_bytes=int(FILE_SYSTEM_PART * num_bytes),
        least_bytes=num_bytes,
        limit=workload.limits.get(Tier.NVME),
    )
