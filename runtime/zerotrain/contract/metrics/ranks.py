"""Metrics of a rank. `runtime.metrics.WorkerMetrics` builds the series, the trainer updates them.

`namespace`, `pod` and `node` are labels of the scrape's target, so that no tenant can forge another's.
"""

from __future__ import annotations

from .spec import MetricSpec, Rows, Source

PHASES = ("data", "forward", "backward", "reduce", "optimizer", "checkpoint")
COLLECTIVES = ("all_gather", "reduce_scatter", "broadcast", "record")
TIERS = ("gpu", "cpu", "pinned", "nvme")
MEMORY_PHASES = ("start", "forward", "backward", "step")
TRANSFER_DIRECTIONS = ("h2d", "d2h", "spill_read", "spill_write")
CHECKPOINT_OPERATIONS = ("save", "load")
FP8_OPERANDS = ("input", "weight", "gradient")
KERNEL_FAMILIES = ("sums", "quantize", "adam")
LOSSES_OF_TIME = ("startup", "replayed", "skipped", "checkpoint")
RANK_FACTS = (
    "attempt",
    "world_size",
    "local_rank",
    "device",
    "transport",
    "zero_stage",
    "dtype",
    "offload",
    "version",
    "gpu_uuid",
    "gpu_name",
)

COLLECTIVE_BUCKETS_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    5.0,
    30.0,
)
CHECKPOINT_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

_all = Rows(source=Source.RANK)
_spills = Rows(source=Source.RANK, only="the rank spills")
_fp8 = Rows(source=Source.RANK, only="linear layers compute in FP8")
_cuda = Rows(source=Source.RANK, only="the rank computes on a GPU")
_rated = Rows(source=Source.RANK, only="the device's peak is known, or `peak_tflops` names one")

_STEPS = (
    _all.seconds(
        "zerotrain_step_duration_seconds",
        "Wall time of one optimizer step, data to update.",
        exemplars=True,
    ),
    _all.seconds(
        "zerotrain_phase_duration_seconds",
        "Wall time that one step spent in a phase; checkpoint: how long training stood still for one.",
        exemplars=True,
        phase=PHASES,
    ),
    _all.seconds(
        "zerotrain_optimizer_step_duration_seconds",
        "Time of one parameter update, gradient clipping and the gather of new weights included.",
        exemplars=True,
    ),
    _all.gauge("zerotrain_loss", "Training loss of the last step; NaN before the first."),
    _all.gauge(
        "zerotrain_grad_norm", "Global gradient norm of the last step before clipping; NaN before the first."
    ),
    _all.gauge("zerotrain_loss_scale", "Factor that the loss is multiplied by; 1 without fp16."),
    _all.gauge("zerotrain_learning_rate", "Learning rate of the last step."),
    _all.gauge("zerotrain_step", "Optimizer steps done, earlier attempts included."),
    _all.gauge("zerotrain_total_steps", "Optimizer steps the job asks for."),
    _all.gauge(
        "zerotrain_last_step_timestamp_seconds",
        "Unix time of the last finished step; of the start of the process before the first.",
    ),
    _all.counter("zerotrain_tokens_total", "Tokens trained on by this rank in this process."),
    _all.counter("zerotrain_samples_total", "Samples trained on by this rank in this process."),
    _all.gauge(
        "zerotrain_step_flops",
        "Floating-point operations of the model in the last step on this rank, by formula: forward and "
        "backward, without recomputation; 0 where these or the tokens are not known.",
    ),
    _rated.gauge(
        "zerotrain_mfu_ratio",
        "Model FLOPs utilisation of the last step: zerotrain_step_flops by the step's duration and the "
        "device's peak in the dtype of its matrix products.",
    ),
    _all.counter(
        "zerotrain_tracker_dropped_points_total",
        "Points that a tracker of the configuration (tensorboard, ...) did not take: it hung or failed.",
    ),
    _all.counter(
        "zerotrain_skipped_steps_total",
        "Steps whose update was left out because of an overflow.",
        exemplars=True,
    ),
    _all.counter(
        "zerotrain_nonfinite_steps_total",
        "Steps whose loss or gradient norm was NaN or infinite; an overflow of fp16, which skips a step, is "
        "not one.",
        exemplars=True,
    ),
    _all.counter(
        "zerotrain_grad_norm_spikes_total",
        "Steps whose gradient norm was over 5 times the median of the last 64, and above it by 10 times "
        "their median deviation.",
        exemplars=True,
    ),
    _all.counter(
        "zerotrain_loss_spikes_total",
        "Steps whose loss was above the median of the last 64 by half its size and by 10 times their median "
        "deviation.",
        exemplars=True,
    ),
    _fp8.gauge(
        "zerotrain_fp8_amax",
        "Largest finite magnitude of an operand of the layers' last products in FP8.",
        operand=FP8_OPERANDS,
    ),
    _fp8.gauge(
        "zerotrain_fp8_overflow_ratio",
        "Share of the layers in whose last product the operand held infinity or NaN, which no scale holds; "
        "finite values never saturate.",
        operand=FP8_OPERANDS,
    ),
)

_TIME = (
    _all.counter("zerotrain_compute_seconds_total", "Time in forward, backward and optimizer."),
    _all.counter(
        "zerotrain_productive_seconds_total",
        "Time of steps that moved the model to a step never reached before.",
    ),
    _all.counter(
        "zerotrain_lost_seconds_total",
        "Time that moved nothing: from the start of the process to the first step, steps done again after a "
        "restart, steps skipped for an overflow, standing still for a checkpoint.",
        reason=LOSSES_OF_TIME,
    ),
    _all.counter("zerotrain_data_wait_seconds_total", "Time spent waiting for the next batch."),
    _all.counter(
        "zerotrain_step_own_seconds_total",
        "Time of steps without the waits for collectives: the rank with the most per step is the straggler. "
        "On a GPU the waits are those of its stream.",
    ),
    _all.counter(
        "zerotrain_optimizer_exposed_seconds_total",
        "Time that training stood still for parameter updates.",
    ),
    _all.counter(
        "zerotrain_optimizer_background_seconds_total",
        "Time of parameter updates that ran beside the next forward pass.",
    ),
)

_COLLECTIVES = (
    _all.seconds(
        "zerotrain_collective_duration_seconds",
        "Time from the start of one collective operation to its completion. record: the few numbers that the "
        "ranks exchange at a step, whose time is that of waiting for the slowest.",
        COLLECTIVE_BUCKETS_S,
        op=COLLECTIVES,
    ),
    _all.counter(
        "zerotrain_collective_bytes_total",
        "Bytes given to other ranks by finished collective operations.",
        op=COLLECTIVES,
    ),
    _all.counter(
        "zerotrain_collective_wait_seconds_total",
        "Time in which the rank could only wait for collectives: its thread, or on a GPU its stream.",
    ),
    _all.counter(
        "zerotrain_state_digest_checks_total",
        "Comparisons of what must be equal on all ranks: weights that each of them holds, step, rate, scale.",
    ),
    _all.counter(
        "zerotrain_state_digest_mismatch_total",
        "Comparisons in which this rank's digest was not rank 0's.",
        exemplars=True,
    ),
)

_CHECKPOINTS = (
    _all.seconds(
        "zerotrain_checkpoint_duration_seconds",
        "Time from the start of a checkpoint to its durable commit, or of loading one.",
        CHECKPOINT_BUCKETS_S,
        exemplars=True,
        operation=CHECKPOINT_OPERATIONS,
    ),
    _all.gauge(
        "zerotrain_last_checkpoint_timestamp_seconds",
        "Unix time of the newest durable checkpoint; of the start of the process while there is none.",
    ),
    _all.gauge("zerotrain_last_checkpoint_step", "Step of the newest durable checkpoint."),
    _all.gauge(
        "zerotrain_checkpoint_interval_seconds",
        "Expected time between two checkpoints, from the job's policy and the step time; 0 when unknown.",
    ),
    _all.gauge(
        "zerotrain_checkpoint_size_bytes",
        "Bytes that this rank wrote into the newest durable checkpoint of this process.",
    ),
    _all.counter("zerotrain_checkpoint_bytes_total", "Bytes that this rank wrote into checkpoints."),
    _all.counter("zerotrain_checkpoint_failures_total", "Checkpoints that could not be made durable."),
    _all.gauge(
        "zerotrain_checkpoint_rejected",
        "Damaged checkpoints that this attempt passed over when it resumed.",
    ),
)

_MEMORY = (
    _all.gauge(
        "zerotrain_memory_peak_bytes",
        "Largest size of the engine's buffers in a tier during a phase, so far; without activations.",
        tier=TIERS,
        phase=MEMORY_PHASES,
    ),
    _all.gauge(
        "zerotrain_memory_planned_bytes",
        "What the byte formulas say of the engine's buffers in a tier at their peak; without activations.",
        tier=TIERS,
    ),
    _all.gauge("zerotrain_process_resident_bytes", "Resident size of the rank's process."),
    _all.gauge("zerotrain_process_resident_peak_bytes", "Largest resident size of the rank's process."),
    _cuda.gauge("zerotrain_gpu_memory_used_bytes", "Memory in use on the rank's GPU, by anybody."),
    _cuda.gauge("zerotrain_gpu_memory_total_bytes", "Memory of the rank's GPU."),
    _cuda.gauge(
        "zerotrain_gpu_memory_allocated_peak_bytes",
        "The most that the rank had allocated on its GPU, activations included.",
    ),
    _cuda.gauge(
        "zerotrain_gpu_kernels_in_use",
        "1 for a family of the engine's CUDA kernels that the rank uses; 0 where the GPU's results were not "
        "the reference's or no code could be loaded, and slower operations of torch are used.",
        family=KERNEL_FAMILIES,
    ),
)

_OFFLOAD = (
    _all.counter(
        "zerotrain_transfer_bytes_total",
        "Bytes moved between memory tiers by offloading; h2d and d2h by the byte formulas.",
        direction=TRANSFER_DIRECTIONS,
    ),
    _all.counter(
        "zerotrain_spill_wait_seconds_total",
        "Time in which an update had nothing to do but wait for the spill's drive.",
    ),
    _all.counter("zerotrain_spill_pass_seconds_total", "Time of passes over the spill file, waits included."),
    _all.counter("zerotrain_spill_pass_bytes_total", "Bytes that these passes read and wrote."),
    _all.counter(
        "zerotrain_spill_io_errors_total",
        "Reads and writes of the spill file that the system refused; the first ends the process.",
    ),
    _all.counter(
        "zerotrain_spill_auth_failures_total",
        "Reads of the spill file that failed authentication; the second of one chunk ends the process.",
    ),
    _spills.gauge(
        "zerotrain_spill_calibrated_bytes_per_second",
        "Bandwidth of the spill file in a probe at the start that reads and writes as passes do.",
    ),
    _spills.gauge("zerotrain_spill_free_bytes", "Free space of the spill file's volumes."),
    _spills.gauge("zerotrain_spill_capacity_bytes", "Size of the spill file's volumes."),
    _spills.gauge("zerotrain_spill_file_bytes", "Size of the rank's spill file."),
    _spills.info(
        "zerotrain_spill_info",
        "How the rank spills: the I/O engine, whether I/O is direct, the encryption (AEAD or None), what "
        "encrypts, and why not a better way.",
        "engine",
        "direct",
        "encryption",
        "backend",
        "reason",
    ),
)

RANK_METRICS: tuple[MetricSpec, ...] = (
    *_STEPS,
    *_TIME,
    *_COLLECTIVES,
    *_CHECKPOINTS,
    *_MEMORY,
    *_OFFLOAD,
    _all.info("zerotrain_rank_info", "What is fixed for the life of the rank's process.", *RANK_FACTS),
)
