"""Memory of one job by tier, against the plan, and the spill: bandwidth, free space, encryption, errors."""

from __future__ import annotations

from deploy.dashboards.model import (
    Column,
    Dashboard,
    Level,
    Panel,
    PanelKind,
    Query,
    Row,
    Scope,
    Threshold,
    Unit,
)
from deploy.dashboards.selectors import WINDOW, of_pod, of_rank, rate

_PASS_BANDWIDTH = f"{rate('zerotrain_spill_pass_bytes_total')} / {rate('zerotrain_spill_pass_seconds_total')}"

_TIERS = Row(
    title="Tiers",
    panels=(
        Panel(
            title="Peak against plan, by tier",
            description="""The largest rank's peak of the engine's buffers divided by what the byte formulas
            planned, activations not included. Healthy is at most 1; above it the plan, and so the check
            before the start, was too kind.""",
            kind=PanelKind.BAR_GAUGE,
            unit=Unit.RATIO,
            minimum=0,
            thresholds=(Threshold(value=1.02, level=Level.WARNING),),
            queries=(
                Query(
                    expr="""max by (tier) (zerotrain_memory_peak_bytes{JOB})
                    / (max by (tier) (zerotrain_memory_planned_bytes{JOB}) > 0)""",
                    legend="{{tier}}",
                ),
            ),
        ),
        Panel(
            title="Peak by tier and phase",
            description="""The largest rank's peak in each phase of a step: where the memory is really needed.
            A tier whose peak is in one phase only can often be lowered by smaller buckets.""",
            kind=PanelKind.BAR_GAUGE,
            unit=Unit.BYTES,
            base=Level.INFO,
            minimum=0,
            queries=(
                Query(
                    expr="max by (tier, phase) (zerotrain_memory_peak_bytes{JOB}) > 0",
                    legend="{{tier}}, {{phase}}",
                ),
            ),
        ),
        Panel(
            title="Plan of one rank, by tier",
            description="""The plan from before the first pod, activations included. The
            operator refuses a job whose plan does not fit.""",
            kind=PanelKind.BAR_GAUGE,
            unit=Unit.BYTES,
            base=Level.INFO,
            minimum=0,
            queries=(
                Query(expr="max by (tier) (zerotrain_job_planned_memory_bytes{JOB})", legend="{{tier}}"),
            ),
        ),
        Panel(
            title="Engine's buffers by tier",
            description="""Peak so far of the largest rank and, dashed in the plan's name, what was planned.
            Flat after the first steps is healthy: a line that goes on rising is a leak.""",
            unit=Unit.BYTES,
            width=12,
            minimum=0,
            queries=(
                Query(expr="max by (tier) (zerotrain_memory_peak_bytes{JOB})", legend="{{tier}}"),
                Query(expr="max by (tier) (zerotrain_memory_planned_bytes{JOB})", legend="{{tier}} planned"),
            ),
        ),
        Panel(
            title="Peak of the engine's host buffers, by rank",
            description="""Host memory of the engine by rank. Ranks of one job hold equal shards: a bright row
            is a rank with more to carry than the others.""",
            kind=PanelKind.HEATMAP,
            unit=Unit.BYTES,
            width=12,
            queries=(
                Query(
                    expr='max by (rank) (zerotrain_memory_peak_bytes{RANKS, tier=~"cpu|pinned"})',
                    legend="{{rank}}",
                ),
            ),
        ),
    ),
)

_LIMITS = Row(
    title="Against the limits",
    panels=(
        Panel(
            title="Host memory of the fullest workers",
            description="""Working set of the worker's container, as the kubelet counts it, divided by its
            limit. At 100 % the kernel kills a rank (exit code 137); raise resources.memory or offload
            less.""",
            unit=Unit.RATIO,
            minimum=0,
            maximum=1,
            thresholds=(Threshold(value=0.9, level=Level.WARNING, alert="HostMemoryNearLimit"),),
            queries=(
                Query(
                    expr="""topk(10, zerotrain_host_memory_used_bytes{JOB}
                    / zerotrain_host_memory_limit_bytes{JOB})""",
                    legend="worker {{worker}}",
                ),
            ),
            alerts=("HostMemoryNearLimit",),
        ),
        Panel(
            title="Process memory by rank",
            description="""Resident memory of each rank's process. The distance to the engine's buffers is
            torch, the data loader and activations.""",
            unit=Unit.BYTES,
            minimum=0,
            queries=(
                Query(expr="max by (rank) (zerotrain_process_resident_bytes{RANKS})", legend="rank {{rank}}"),
            ),
            alerts=("HostMemoryNearLimit",),
        ),
        Panel(
            title="GPU memory by rank",
            description="""Memory in use on the rank's whole GPU, as the driver counts it, divided by its
            size: allocator, CUDA context and NCCL together. CUDA jobs only.""",
            unit=Unit.RATIO,
            minimum=0,
            maximum=1,
            thresholds=(Threshold(value=0.95, level=Level.WARNING, alert="GpuMemoryHeadroomLow"),),
            queries=(
                Query(
                    expr="""max by (rank) (zerotrain_gpu_memory_used_bytes{RANKS}
                    / zerotrain_gpu_memory_total_bytes{RANKS})""",
                    legend="rank {{rank}}",
                ),
            ),
            alerts=("GpuMemoryHeadroomLow",),
        ),
        Panel(
            title="Peak of torch's allocator by rank",
            description="""Peak of what torch allocated on the GPU since the start. The distance to the
            driver's number is fragmentation, NCCL's buffers and the CUDA context. CUDA jobs only.""",
            unit=Unit.BYTES,
            minimum=0,
            queries=(
                Query(
                    expr="max by (rank) (zerotrain_gpu_memory_allocated_peak_bytes{RANKS})",
                    legend="rank {{rank}}",
                ),
            ),
            alerts=("GpuMemoryHeadroomLow",),
        ),
        Panel(
            title="Frame buffer in use (DCGM)",
            description="""GPU memory of the job's pods as dcgm-exporter counts it, every GPU one line: also
            of GPUs that the pod holds and no rank uses.""",
            unit=Unit.BYTES,
            minimum=0,
            queries=(
                Query(
                    expr=f"({of_pod('DCGM_FI_DEV_FB_USED')}) * 1048576",
                    legend="{{exported_pod}} GPU {{gpu}}",
                ),
            ),
            alerts=("GpuMemoryHeadroomLow",),
        ),
        Panel(
            title="PCIe traffic by rank (DCGM)",
            description="""Bytes per second between GPU and host: what offloading moves. A PCIe 4.0 slot of
            16 lanes carries about 25 GiB/s each way, a 5.0 slot about 50. From dcgm-exporter, joined to the
            rank by the GPU's UUID.""",
            unit=Unit.BYTES_PER_SECOND,
            minimum=0,
            queries=(
                Query(expr=of_rank("DCGM_FI_PROF_PCIE_TX_BYTES"), legend="rank {{rank}} from GPU"),
                Query(expr=of_rank("DCGM_FI_PROF_PCIE_RX_BYTES"), legend="rank {{rank}} to GPU"),
            ),
        ),
    ),
)

_SPILL = Row(
    title="Offload and spill",
    panels=(
        Panel(
            title="Bytes between the tiers",
            description="""What offloading moves: host to device, device to host, and the spill file read and
            written, of all ranks together.""",
            unit=Unit.BYTES_PER_SECOND,
            minimum=0,
            queries=(
                Query(expr=rate("zerotrain_transfer_bytes_total", by="direction"), legend="{{direction}}"),
            ),
        ),
        Panel(
            title="Spill bandwidth against calibration",
            description="""Bandwidth of the passes over the spill file, and what a probe of the same file
            reached at the start, per rank. Far below it while the drive is the limit, someone else uses the
            drive or it is wearing out.""",
            unit=Unit.BYTES_PER_SECOND,
            minimum=0,
            queries=(
                Query(expr=_PASS_BANDWIDTH, legend="reached, mean of the ranks"),
                Query(
                    expr="avg by (namespace, job_name) (zerotrain_spill_calibrated_bytes_per_second{JOB})",
                    legend="calibrated at the start",
                ),
            ),
            alerts=("SpillBandwidthBelowCalibration",),
        ),
        Panel(
            title="Waiting for the drive",
            description="""Share of the passes over the spill in which the update had nothing to do but wait
            for the drive. Near 0 the processor is the limit, near 1 the drive is.""",
            unit=Unit.RATIO,
            minimum=0,
            maximum=1,
            queries=(
                Query(
                    expr=f"""{rate("zerotrain_spill_wait_seconds_total")}
                    / {rate("zerotrain_spill_pass_seconds_total")}""",
                    legend="waiting",
                ),
            ),
            alerts=("SpillBandwidthBelowCalibration",),
        ),
        Panel(
            title="Free space on the spill's volume",
            description="""Used share of the fullest spill volume, all its users counted. Our own file is
            allocated whole at the start, so growth has another cause.""",
            unit=Unit.RATIO,
            minimum=0,
            maximum=1,
            queries=(
                Query(
                    expr="""1 - min by (namespace, job_name) (zerotrain_spill_free_bytes{JOB}
                    / zerotrain_spill_capacity_bytes{JOB})""",
                    legend="used",
                ),
            ),
            alerts=("SpillFillingUp",),
        ),
        Panel(
            title="Spill errors",
            description="""Reads and writes that the system refused, and chunks that failed authentication:
            not the bytes that we wrote. Healthy is 0; the process ends at once, so the operator's record
            of failures is added.""",
            unit=Unit.COUNT,
            minimum=0,
            queries=(
                Query(
                    expr=f"sum(increase(zerotrain_spill_io_errors_total{{JOB}}[{WINDOW}]))",
                    legend="refused reads and writes",
                ),
                Query(
                    expr=f"sum(increase(zerotrain_spill_auth_failures_total{{JOB}}[{WINDOW}]))",
                    legend="failed authentication",
                ),
            ),
            alerts=("SpillIOErrors", "SpillAuthFailure"),
        ),
        Panel(
            title="Spill files by rank",
            description="""Size of each rank's spill file. It has no name in the file system and goes with the
            process.""",
            unit=Unit.BYTES,
            minimum=0,
            queries=(
                Query(expr="max by (rank) (zerotrain_spill_file_bytes{RANKS})", legend="rank {{rank}}"),
            ),
        ),
        Panel(
            title="How each rank spills",
            description="""I/O engine, direct or through the page cache, encryption and what encrypts, and why
            not a faster way. Encryption None is a choice in the job file and has an alert.""",
            kind=PanelKind.TABLE,
            width=24,
            height=6,
            queries=(
                Query(
                    expr="""max by (rank, engine, direct, encryption, backend, reason)
                    (zerotrain_spill_info{RANKS})"""
                ),
            ),
            columns=tuple(
                Column(label=label, title=title)
                for label, title in (
                    ("rank", "Rank"),
                    ("engine", "I/O engine"),
                    ("direct", "Direct"),
                    ("encryption", "Encryption"),
                    ("backend", "Encrypted by"),
                    ("reason", "Why not better"),
                )
            ),
            alerts=("SpillNotEncrypted",),
        ),
    ),
)

MEMORY = Dashboard(
    name="memory",
    title="zerotrain / Memory tiers and spill",
    description="""Where the bytes of one job are: GPU, host, pinned memory and drive, against the plan and
    the limits, and how the encrypted spill performs.""",
    scope=Scope.JOB,
    rows=(_TIERS, _LIMITS, _SPILL),
)
