"""The resolved configuration: what engine, operator and planner read, whatever the user's file said.

`resolve()` is the only maker of these objects in the product. They are frozen, every number has its final
type and unit, and nothing is `"auto"` any more. Names follow DeepSpeed's keys without their `stage3_` prefix.
The defaults here are the defaults of the file format (`keys.py` is checked against them by a test).
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
    """Something that was accepted but means something else here; print it once, never fail on it."""

    path: str
    """Dotted path of the key in the user's file."""

    message: str
    """What happens instead, one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsupported:
    """A request that loads and shows but is not run by this version; `initialize` and operator refuse it."""

    path: str
    """Dotted path of the key in the user's file."""

    reason: str
    """Why it is not run, one sentence."""

    way_out: str
    """What to write instead, one sentence."""

    lifted_by: str = ""
    """The argument of `initialize` with which it runs after all."""

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
    """`file` as written, `auto` computed for "auto", `default`, or `derived` from other keys."""

    status: KeyStatus
    """Whether this version does what the key says."""

    effect: str
    """What this value does here, one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Samples: train_batch_size == micro_batch_size * gradient_accumulation_steps * world_size, always."""

    train_batch_size: int
    """Samples that one optimizer step sees, over all ranks."""

    micro_batch_size: int
    """Samples of one forward pass on one rank."""

    gradient_accumulation_steps: int
    """Forward/backward passes per optimizer step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """Where optimizer states or parameters live when they leave the accelerator."""

    device: OffloadDevice
    """`cpu` = host memory, `nvme` = encrypted spill. "none" in the file makes the whole block None."""

    nvme_path: str | None = None
    """Folder of the spill; None = the launch environment's path."""

    pin_memory: bool = True
    """Page-lock host buffers."""

    buffer_count: int = 4
    """DeepSpeed's number of staging buffers; a hint (4 for the optimizer, 5 for parameters)."""

    buffer_size: int = 100_000_000
    """Elements per staging buffer of offloaded parameters; a hint."""

    max_in_cpu: int = 1_000_000_000
    """Elements of a rank's parameter shards kept in host memory when the device is `nvme`."""

    pipeline_read: bool = False
    """DeepSpeed: read the next tile while the current one is updated; always so here."""

    pipeline_write: bool = False
    """DeepSpeed: write the previous tile while the current one is updated; always so here."""

    fast_init: bool = False
    """DeepSpeed: skip the first write of optimizer states that are all zero; a hint."""

    ratio: float = 1.0
    """Fraction of the optimizer states that is offloaded, 0..1 (optimizer only)."""

    just_in_time: bool | None = None
    """Update in the background, each unit before its next forward; None = where it pays (optimizer only)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpillConfig:
    """The spill of the NVMe tier, which optimizer states and parameters share."""

    encryption: Encryption | None = None
    """None = as the launch environment says, else AEAD."""

    max_bytes: int | None = None
    """Largest file of one rank; None = the rank's part of the worker's volume."""

    paths: tuple[str, ...] = ()
    """Folders to stripe over; () = the blocks' `nvme_path`, else the launch environment's path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AioConfig:
    """Asynchronous file I/O of the NVMe tier."""

    block_size: int = 1_048_576
    """Bytes of one request."""

    queue_depth: int = 32
    """Requests in flight per folder."""

    intra_op_parallelism: int = 1
    """DeepSpeed: threads that share one transfer; a hint."""

    single_submit: bool = False
    """DeepSpeed: submit requests one by one; a hint."""

    overlap_events: bool = True
    """DeepSpeed: submit new requests while old ones complete; always so here."""

    use_gds: bool = False
    """DeepSpeed: GPUDirect storage; a hint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafModuleConfig:
    """Modules that are gathered as a whole, whatever is in them (a block with experts, say)."""

    classes: tuple[str, ...] = ()
    """Class names, bare or with their module."""

    names: tuple[str, ...] = ()
    """Names within the model."""

    name_suffixes: tuple[str, ...] = ()
    """Ends of such names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """Partitioning over the data-parallel ranks, and the memory and communication limits that go with it."""

    stage: int = 0
    """0 = replicate all, 1 = shard optimizer states, 2 = + gradients, 3 = + parameters."""

    contiguous_gradients: bool = True
    """Gradients live in one buffer per unit."""

    reduce_scatter: bool = True
    """Reduce gradients by reduce-scatter; false = all-reduce and keep the own part (stages 1 and 2)."""

    reduce_bucket_size: int = 500_000_000
    """Elements of finished units on the wire while backward goes on."""

    allgather_partitions: bool = True
    """Stages 1 and 2: gather updated parameters by all-gather."""

    allgather_bucket_size: int = 500_000_000
    """Elements of updated units that are gathered at once (stages 1 and 2)."""

    overlap_comm: bool = False
    """Overlap gradient reduction with backward; default true at stage 3 and false below."""

    prefetch_bucket_size: int = 50_000_000
    """Stage 3: elements gathered ahead of use."""

    param_persistence_threshold: int = 100_000
    """Stage 3: parameters with fewer elements stay replicated; 0 = none."""

    model_persistence_threshold: int = sys.maxsize
    """Stage 3: cap on the elements of all replicated parameters together."""

    max_live_parameters: int = 1_000_000_000
    """Stage 3: elements gathered at once."""

    max_reuse_distance: int = 1_000_000_000
    """Stage 3: do not free parameters that are used again within this many elements."""

    gather_16bit_weights_on_model_save: bool = False
    """Stage 3: a 16-bit export holds the whole model."""

    module_granularity_threshold: int = 0
    """Stage 3: modules with fewer elements than this are not units of their own; 0 = off."""

    sub_group_size: int = 1_000_000_000
    """Stage 3: elements updated at once by the optimizer step."""

    ignore_unused_parameters: bool = True
    """Parameters without a gradient are allowed; their gradient counts as zero."""

    round_robin_gradients: bool = False
    """Stages 1 and 2 with offload: spread copies to the host over the ranks."""

    offload_optimizer: OffloadConfig | None = None
    """None = optimizer states stay on the accelerator."""

    offload_param: OffloadConfig | None = None
    """None = parameter shards stay on the accelerator (stage 3 only otherwise)."""

    spill: SpillConfig = field(default_factory=SpillConfig)
    """The spill of what is offloaded to NVMe."""

    leaf_module: LeafModuleConfig = field(default_factory=LeafModuleConfig)
    """Modules that must be units and hold none."""

    zero_hpz_partition_size: int = 1
    """Ranks of a secondary shard group (ZeRO++ hpZ); 1 = off."""

    zero_quantized_weights: bool = False
    """All-gather parameters as int8 (ZeRO++ qwZ)."""

    zeropp_loco_param: Mapping[str, float] | None = None
    """Error feedback of quantised gradients: err_beta, reset_T; None = off."""

    zero_quantized_nontrainable_weights: bool = False
    """Store frozen parameters as int8."""

    zero_quantized_gradients: bool = False
    """Reduce gradients as int4 (ZeRO++ qgZ)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """Number formats. Master weights and optimizer states are fp32 whenever `compute_dtype` is narrower."""

    compute_dtype: Dtype = "fp32"
    """Dtype of parameters, activations and autograd's gradients."""

    grad_accum_dtype: Dtype = "fp32"
    """Dtype in which gradients of micro-batches are summed."""

    reduce_dtype: Dtype = "fp32"
    """Dtype of gradients on the wire (`communication_data_type`); fp32 when the file does not say."""

    gradient_reduce_op: Literal["mean", "sum"] = "mean"
    """How gradients of the ranks are combined."""

    store_param_remainders: bool = False
    """bf16 only: the weight is the upper half of its fp32 master, of which only the lower half is stored."""

    check_grad_overflow: bool = True
    """Skip a step whose gradients are not finite."""

    loss_scale: float = 0.0
    """fp16 only: 0 = dynamic, else the fixed factor."""

    initial_scale_power: int = 16
    """fp16 only: dynamic scaling starts at 2 ** this."""

    loss_scale_window: int = 1000
    """fp16 only: steps without overflow before the scale doubles."""

    hysteresis: int = 2
    """fp16 only: overflows tolerated before the scale halves."""

    consecutive_hysteresis: bool = False
    """fp16 only: a good step refills the hysteresis."""

    min_loss_scale: float = 1.0
    """fp16 only: the scale never falls below this."""

    raise_error_at_min_scale: bool = True
    """fp16 only: stop when the scale would have to fall below the smallest; false = go on skipping steps."""

    autocast_dtype: Dtype | None = None
    """Forward runs under torch.autocast with this dtype; None = it does not."""

    cast_inputs: bool = False
    """Cast fp32 arguments of the model to the compute dtype (`auto_cast`)."""

    buffer_dtype: Dtype | None = None
    """Dtype of floating-point buffers; None = that of the model. BatchNorm's statistics have that of its
    weights."""

    keep_in_fp32_modules: tuple[str, ...] = ()
    """Parts or patterns of the names of buffers that are never cast."""

    gradient_predivision: float = 1.0
    """Gradients are divided by this before they travel; the rest of the division comes after the sum."""

    @property
    def product_dtype(self) -> Dtype:
        """Of matrix products: autocast's where there is one."""
        return self.autocast_dtype or self.compute_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer that the engine builds; absent when the caller brings one."""

    type: str
    """Canonical name: `AdamW`, `Adam`, `SGD`, ... (aliases are already mapped)."""

    lr: float = 1e-3
    """Base learning rate; a scheduler overrides it."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    weight_decay: float = 0.0
    """Decay per step; decoupled from the gradient when `decoupled_weight_decay`."""

    decoupled_weight_decay: bool = True
    """true = AdamW; false = L2 added to the gradient (`Adam` with `adam_w_mode: false`)."""

    bias_correction: bool = True
    """Correct the moments' start at zero."""

    native: bool = False
    """true = the native one-pass kernel was asked for by name (`DeepSpeedCPUAdam`), so that it must be there;
    Adam, AdamW, Adagrad and Lion use it on CPU where it is, unless `torch_adam` asks for torch's
    arithmetic."""

    momentum: float = 0.0
    """SGD only."""

    is_untested: bool = False
    """The type is a class of torch.optim that the engine has no update of its own for; `params` are its
    arguments as far as the file gives them."""

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
    """Recompute activations in backward instead of keeping them."""

    configured: bool = False
    """The file holds the block: the trainer checkpoints every transformer block."""

    partition_activations: bool = False
    """Spread checkpoints over the model-parallel group."""

    number_checkpoints: int | None = None
    """Checkpoints of a contiguous buffer, of which there are as many as it takes; None = eight, and as many
    again whenever all are in use."""

    contiguous_memory_optimization: bool = False
    """Copy checkpoints into one buffer."""

    synchronize_checkpoint_boundary: bool = False
    """Synchronise the device at each checkpoint."""

    cpu_checkpointing: bool = False
    """Keep checkpoints in host memory."""

    profile: bool = False
    """Time forward and backward of every checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """How the engine saves."""

    asynchronous: bool = False
    """Saves return when the state is copied; a thread writes the copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig(WrittenMapping):
    """Everything the engine needs, final. Refuse to run while `unsupported` is not empty.

    As a mapping it is the JSON object as the user wrote it.
    """

    world_size: int
    """Data-parallel ranks that the batch sizes were resolved for."""

    batch: BatchConfig
    """Batch sizes."""

    zero: ZeroConfig = field(default_factory=ZeroConfig)
    """Partitioning."""

    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""

    optimizer: OptimizerConfig | None = None
    """None = the caller passes an optimizer or the trainer's default applies."""

    scheduler: SchedulerConfig | None = None
    """None = constant learning rate."""

    activation_checkpointing: ActivationCheckpointingConfig = field(
        default_factory=ActivationCheckpointingConfig
    )
    """Recomputation."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving."""

    aio: AioConfig = field(default_factory=AioConfig)
    """File I/O of the NVMe tier."""

    managed_gradient_accumulation: bool = True
    """The engine counts micro-batches; false = every `step()` updates."""

    gradient_clipping: float = 0.0
    """Largest global 2-norm of the gradient; 0.0 = off (also when the file does not say)."""

    zero_allow_untested_optimizer: bool = False
    """Allow any element-wise torch optimizer."""

    steps_per_print: int | None = None
    """Steps between the engine's own log lines; None = none."""

    wall_clock_breakdown: bool = False
    """Measure and log the time of each phase of a step."""

    memory_breakdown: bool = False
    """Log memory after each phase of a step."""

    dataloader_drop_last: bool = False
    """Drop the last incomplete batch of an epoch."""

    uneven_inputs: Literal["error", "join"] = "error"
    """What happens when ranks have unequal numbers of batches."""

    notices: tuple[Notice, ...] = ()
    """What was accepted with a different meaning."""

    unsupported: tuple[Unsupported, ...] = ()
    """What this version does not run."""

    report: tuple[KeyReport, ...] = ()
    """One entry per known key, in the order of the documentation."""

    source: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The JSON object as the user wrote it, with computed values in place of `"auto"`."""
