"""The resolved configuration that engine, operator and planner read.

In the product only `resolve()` creates these objects. They are frozen, every number has its final type and
unit, and no value is `"auto"`. Names follow DeepSpeed's keys without their `stage3_` prefix. The defaults
here are the defaults of the file format (a test checks `keys.py` against them).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from .written import WrittenMapping

Dtype: TypeAlias = Literal["fp32", "bf16", "fp16"]
OffloadDevice: TypeAlias = Literal["cpu", "nvme"]
Encryption: TypeAlias = Literal["AEAD", "None"]
Origin: TypeAlias = Literal["file", "auto", "default", "derived"]
KeyStatus: TypeAlias = Literal["implemented", "accepted", "not run", "refused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """A key that was accepted but has another meaning here. Print it once, never fail on it."""

    path: str
    """Dotted path of the key in the user's file."""

    message: str
    """Sentence about what happens instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsupported:
    """A setting that can be loaded and shown but not run; `initialize` and the operator refuse it."""

    path: str
    """Dotted path of the key in the user's file."""

    reason: str
    """Reason in one sentence."""

    way_out: str
    """Remedy in one sentence: what to write instead."""

    lifted_by: str = ""
    """Argument of `initialize` with which the setting can run after all."""

    def __str__(self) -> str:
        return f"{self.path}: {self.reason} {self.way_out}"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyReport:
    """One line of `zerotrain config show`."""

    path: str
    """Canonical dotted path."""

    value: Any
    """Final value (JSON type)."""

    origin: Origin
    """Origin: `file` as written, `auto` computed for "auto", `default`, or `derived` from other keys."""

    status: KeyStatus
    """Whether this version does what the key says."""

    effect: str
    """Effect of this value here, in one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Batch sizes in samples.

    train_batch_size == micro_batch_size * gradient_accumulation_steps * world_size always holds.
    """

    train_batch_size: int
    """Samples of one optimizer step, over all ranks."""

    micro_batch_size: int
    """Samples of one forward pass on one rank."""

    gradient_accumulation_steps: int
    """Forward/backward passes per optimizer step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """Location of optimizer states or parameters off the accelerator."""

    device: OffloadDevice
    """Either `cpu` (host memory) or `nvme` (encrypted spill).

    "none" in the file makes the whole block None.
    """

    nvme_path: str | None = None
    """Folder of the spill; None uses the launch environment's path."""

    pin_memory: bool = True
    """Whether to page-lock host buffers."""

    buffer_count: int = 4
    """DeepSpeed's number of staging buffers; a hint (4 for the optimizer, 5 for parameters)."""

    buffer_size: int = 100_000_000
    """Elements per staging buffer of offloaded parameters; a hint."""

    max_in_cpu: int = 1_000_000_000
    """Elements of a rank's parameter shards kept in host memory when the device is `nvme`."""

    pipeline_read: bool = False
    """DeepSpeed reads the next tile while the current one is updated; always so here."""

    pipeline_write: bool = False
    """DeepSpeed writes the previous tile while the current one is updated; always so here."""

    fast_init: bool = False
    """DeepSpeed skips the first write of optimizer states that are all zero; a hint."""

    ratio: float = 1.0
    """Fraction of the optimizer states that is offloaded, 0..1 (optimizer only)."""

    just_in_time: bool | None = None
    """Whether to update in the background, each unit before its next forward (optimizer only).

    None chooses it where it is faster.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class SpillConfig:
    """The spill of the NVMe tier, which optimizer states and parameters share."""

    encryption: Encryption | None = None
    """Encryption of the spill; None takes the launch environment's value, else AEAD."""

    max_bytes: int | None = None
    """Largest file of one rank in bytes; None uses the rank's part of the worker's volume."""

    paths: tuple[str, ...] = ()
    """Folders to stripe over; () uses the blocks' `nvme_path`, else the launch environment's path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AioConfig:
    """Asynchronous file I/O of the NVMe tier."""

    block_size: int = 1_048_576
    """Bytes of one request."""

    queue_depth: int = 32
    """Requests in flight per folder."""

    intra_op_parallelism: int = 1
    """DeepSpeed's number of threads that share one transfer; a hint."""

    single_submit: bool = False
    """DeepSpeed submits requests one by one; a hint."""

    overlap_events: bool = True
    """DeepSpeed submits new requests while old ones complete; always so here."""

    use_gds: bool = False
    """DeepSpeed's GPUDirect storage; a hint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafModuleConfig:
    """Modules that are gathered as a whole, whatever they contain (such as a block with experts)."""

    classes: tuple[str, ...] = ()
    """Class names, bare or with their module."""

    names: tuple[str, ...] = ()
    """Names within the model."""

    name_suffixes: tuple[str, ...] = ()
    """Suffixes of names within the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """Partitioning over the data-parallel ranks, and the related memory and communication limits."""

    stage: int = 0
    """ZeRO stage: 0 = replicate all, 1 = shard optimizer states, 2 = + gradients, 3 = + parameters."""

    contiguous_gradients: bool = True
    """Whether gradients are in one buffer per unit."""

    reduce_scatter: bool = True
    """Whether to reduce-scatter gradients; false = all-reduce and keep the own part (stages 1 and 2)."""

    reduce_bucket_size: int = 500_000_000
    """Elements of finished units in flight while backward continues."""

    allgather_partitions: bool = True
    """Whether updated parameters are gathered by all-gather (stages 1 and 2)."""

    allgather_bucket_size: int = 500_000_000
    """Elements of updated units that are gathered at once (stages 1 and 2)."""

    overlap_comm: bool = False
    """Whether gradient reduction overlaps with backward; default true at stage 3 and false below."""

    prefetch_bucket_size: int = 50_000_000
    """Elements gathered ahead of use (stage 3)."""

    param_persistence_threshold: int = 100_000
    """Number of elements below which parameters stay replicated (stage 3); 0 = none."""

    model_persistence_threshold: int = sys.maxsize
    """Cap on the elements of all replicated parameters together (stage 3)."""

    max_live_parameters: int = 1_000_000_000
    """Elements gathered at once (stage 3)."""

    max_reuse_distance: int = 1_000_000_000
    """Elements within which a parameter that is used again is not freed (stage 3)."""

    gather_16bit_weights_on_model_save: bool = False
    """Whether a 16-bit export holds the whole model (stage 3)."""

    module_granularity_threshold: int = 0
    """Number of elements below which modules are not units of their own (stage 3); 0 = off."""

    sub_group_size: int = 1_000_000_000
    """Elements updated at once by the optimizer step (stage 3)."""

    ignore_unused_parameters: bool = True
    """Whether parameters without a gradient are allowed; their gradient counts as zero."""

    round_robin_gradients: bool = False
    """Whether to spread copies to the host over the ranks (stages 1 and 2 with offload)."""

    offload_optimizer: OffloadConfig | None = None
    """Offload of optimizer states; None keeps them on the accelerator."""

    offload_param: OffloadConfig | None = None
    """Offload of parameter shards, only at stage 3; None keeps them on the accelerator."""

    spill: SpillConfig = field(default_factory=SpillConfig)
    """Spill of the states and parameters that are offloaded to NVMe."""

    leaf_module: LeafModuleConfig = field(default_factory=LeafModuleConfig)
    """Modules that must be units and contain none."""

    zero_hpz_partition_size: int = 1
    """Ranks of a secondary shard group (ZeRO++ hpZ); 1 = off."""

    zero_quantized_weights: bool = False
    """Whether to all-gather parameters as int8 (ZeRO++ qwZ)."""

    zero_quantized_nontrainable_weights: bool = False
    """Whether to store frozen parameters as int8."""

    zero_quantized_gradients: bool = False
    """Whether to reduce gradients as int4 (ZeRO++ qgZ)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """Number formats.

    Master weights and optimizer states are fp32 if `compute_dtype` is narrower, unless bf16 is asked for.
    """

    compute_dtype: Dtype = "fp32"
    """Dtype of parameters, activations and autograd's gradients."""

    grad_accum_dtype: Dtype = "fp32"
    """Dtype in which gradients of micro-batches are summed."""

    reduce_dtype: Dtype = "fp32"
    """Dtype of reduced gradients (`communication_data_type`); fp32 if the file does not set it."""

    gradient_reduce_op: Literal["mean", "sum"] = "mean"
    """Operation that combines the gradients of the ranks."""

    store_param_remainders: bool = False
    """Whether to store only the lower half of each fp32 master (bf16 only).

    The weight is the upper half.
    """

    bf16_masters: bool = False
    """Whether bf16 weights are their own masters, and gradients are summed in bf16 (bf16 only)."""

    bf16_states: bool = False
    """Whether optimizer states are bf16; only with `bf16_masters`."""

    check_grad_overflow: bool = True
    """Whether to skip a step whose gradients are not finite."""

    loss_scale: float = 0.0
    """Fixed loss scale (fp16 only); 0 = dynamic."""

    initial_scale_power: int = 16
    """Exponent of the initial dynamic scale, 2 ** this (fp16 only)."""

    loss_scale_window: int = 1000
    """Steps without overflow before the scale doubles (fp16 only)."""

    hysteresis: int = 2
    """Overflows tolerated before the scale halves (fp16 only)."""

    consecutive_hysteresis: bool = False
    """Whether a good step refills the hysteresis (fp16 only)."""

    min_loss_scale: float = 1.0
    """Lower limit of the scale (fp16 only)."""

    raise_error_at_min_scale: bool = True
    """Whether to stop if the scale would fall below its minimum (fp16 only); false = keep skipping steps."""

    autocast_dtype: Dtype | None = None
    """Dtype of torch.autocast in forward; None = no autocast."""

    cast_inputs: bool = False
    """Whether to cast fp32 arguments of the model to the compute dtype (`auto_cast`)."""

    buffer_dtype: Dtype | None = None
    """Dtype of floating-point buffers; None = that of the model.

    BatchNorm's statistics have that of its weights.
    """

    keep_in_fp32_modules: tuple[str, ...] = ()
    """Parts or patterns of the names of buffers that are never cast."""

    gradient_predivision: float = 1.0
    """Divisor of gradients before reduction; the rest of the division follows the sum."""

    @property
    def product_dtype(self) -> Dtype:
        """Dtype of matrix products: autocast's if set, else the compute dtype."""
        return self.autocast_dtype or self.compute_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Config:
    """Products of linear layers in FP8, over bf16 tensors."""

    enabled: bool = False
    """Whether they are computed so; needs `compute_dtype` bf16."""

    recipe: Literal["rowwise", "tensorwise"] = "rowwise"
    """Groups of elements with a scale of their own."""

    exclude: tuple[str, ...] = ("lm_head", "head", "embed_out")
    """Last parts of names, or patterns, of layers that stay in bf16."""

    weight_gradient: Literal["bf16", "fp8"] = "bf16"
    """Format of the product that gives the weights' gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """Compilation of each unit's forward by torch.compile, whose arguments the other fields are."""

    enabled: bool = False
    """Whether units are compiled."""

    backend: str = "inductor"
    """Name of the backend."""

    mode: str = "default"
    """Mode of the backend, never one with CUDA graphs."""

    options: Mapping[str, Any] | None = None
    """Options of the backend, in place of a mode."""

    dynamic: bool | None = None
    """Whether sizes count as changing from the start; None = once they have changed."""

    fullgraph: bool = False
    """Whether a forward that is not one graph is an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer that the engine builds; absent if the caller provides one."""

    type: str
    """Canonical name: `AdamW`, `Adam`, `SGD`, ... (aliases are already mapped)."""

    lr: float = 1e-3
    """Base learning rate; a scheduler overrides it."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment."""

    eps: float = 1e-8
    """Term that is added to the root of the second moment."""

    weight_decay: float = 0.0
    """Decay per step; decoupled from the gradient if `decoupled_weight_decay`."""

    decoupled_weight_decay: bool = True
    """Whether the decay is decoupled (AdamW).

    If false, L2 is added to the gradient (`Adam` with `adam_w_mode: false`).
    """

    bias_correction: bool = True
    """Whether to correct the moments' start at zero."""

    native: bool = False
    """Whether the native one-pass kernel was requested by name (`DeepSpeedCPUAdam`), so that it must exist.

    Adam, AdamW, Adagrad and Lion use it on CPU if it exists, unless `torch_adam` requests torch's arithmetic.
    """

    momentum: float = 0.0
    """Momentum of SGD."""

    is_untested: bool = False
    """Whether the type is a class of torch.optim for which the engine has no update of its own.

    `params` are then its arguments as far as the file sets them.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    """Every remaining parameter of the optimizer's type, resolved (JSON types)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Learning-rate schedule; absent = constant."""

    type: str
    """Canonical name: `WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`, ..."""

    params: Mapping[str, Any] = field(default_factory=dict)
    """Every parameter of that type under its DeepSpeed name, defaults filled in (JSON types)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationCheckpointingConfig:
    """Recomputation of activations in backward instead of keeping them."""

    configured: bool = False
    """Whether the file has the block, so that the trainer checkpoints every transformer block."""

    partition_activations: bool = False
    """Whether to spread checkpoints over the model-parallel group."""

    number_checkpoints: int | None = None
    """Checkpoints of a contiguous buffer; more buffers are added when needed.

    None starts with eight, and doubles whenever all are in use.
    """

    contiguous_memory_optimization: bool = False
    """Whether to copy checkpoints into one buffer."""

    synchronize_checkpoint_boundary: bool = False
    """Whether to synchronise the device at each checkpoint."""

    cpu_checkpointing: bool = False
    """Whether to keep checkpoints in host memory."""

    profile: bool = False
    """Whether to time forward and backward of every checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Settings of the engine's saves."""

    asynchronous: bool = False
    """Whether saves return when the state is copied; a thread writes the copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig(WrittenMapping):
    """The whole final configuration of the engine. Refuse to run while `unsupported` is not empty.

    Used as a mapping, it is the JSON object as the user wrote it.
    """

    world_size: int
    """Data-parallel ranks for which the batch sizes were resolved."""

    batch: BatchConfig

    zero: ZeroConfig = field(default_factory=ZeroConfig)
    """Partitioning."""

    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""

    fp8: Fp8Config = field(default_factory=Fp8Config)
    """Products in FP8."""

    compile: CompileConfig = field(default_factory=CompileConfig)
    """Compilation of the units."""

    optimizer: OptimizerConfig | None = None
    """Optimizer; None if the caller passes one or the trainer's default applies."""

    scheduler: SchedulerConfig | None = None
    """Schedule; None = constant learning rate."""

    activation_checkpointing: ActivationCheckpointingConfig = field(
        default_factory=ActivationCheckpointingConfig
    )
    """Recomputation of activations."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saves."""

    aio: AioConfig = field(default_factory=AioConfig)
    """File I/O of the NVMe tier."""

    managed_gradient_accumulation: bool = True
    """Whether the engine counts micro-batches; false = every `step()` updates."""

    gradient_clipping: float = 0.0
    """Largest global 2-norm of the gradient; 0.0 = off (also if the file does not set it)."""

    zero_allow_untested_optimizer: bool = False
    """Whether to allow any element-wise torch optimizer."""

    steps_per_print: int | None = None
    """Steps between the engine's own log lines; None = no lines."""

    wall_clock_breakdown: bool = False
    """Whether to measure and log the time of each phase of a step."""

    memory_breakdown: bool = False
    """Whether to log memory after each phase of a step."""

    dataloader_drop_last: bool = False
    """Whether to drop the last incomplete batch of an epoch."""

    uneven_inputs: Literal["error", "join"] = "error"
    """Reaction to ranks with unequal numbers of batches."""

    peak_tflops: float | None = None
    """Peak of a rank's device in TFLOP/s, for the MFU; None = the data sheet's, if the device is known."""

    trackers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of every enabled tracker, by the names of block and keys."""

    notices: tuple[Notice, ...] = ()
    """Keys that were accepted with a different meaning."""

    unsupported: tuple[Unsupported, ...] = ()
    """Settings that this version does not run."""

    report: tuple[KeyReport, ...] = ()
    """One entry per known key, in the order of the documentation."""

    source: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """JSON object as the user wrote it, with computed values in place of `"auto"`."""
