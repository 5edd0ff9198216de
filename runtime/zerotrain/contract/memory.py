"""How many bytes one rank needs, tier by tier: the planner's formulas, as pure functions.

Symbols of the ZeRO papers in brackets. All sizes are of *one rank*; "numel" counts elements after padding.
With [Psi] trainable and [Phi] frozen elements, [N] ranks, [c] compute, [a] stored gradient, [r] reduction and
[K] optimizer bytes per element, the persistent part is

    stage 0: (c + a + K) Psi            stage 2: c Psi + (a + K) Psi / N
    stage 1: (c + a) Psi + K Psi / N    stage 3: (c + a + K) Psi / N + c n_root

plus c Phi for frozen parameters (c Phi / N at stage 3). Used by the operator's admission, the planner and the
engine's own accounting test, so that a job that will not fit is refused with the numbers that are then met.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ALIGN_NUMEL = 2048
"""Elements; a rank's shard of a unit is a multiple of it."""

ADAM_STATE_BYTES = 12
"""[K] fp32 master weight, first and second moment, bytes per element."""

SPLIT_ADAM_STATE_BYTES = 10
"""[K'] as ADAM_STATE_BYTES where the bf16 weight is the upper half of the master weight."""

TILE_NUMEL = 1 << 20
"""[T] elements of one tile of the NVMe tier."""

TAG_BYTES = 28
"""Host memory per encrypted chunk: its tag and its generation."""

TAG_CHUNK_NUMEL = 16_384
"""Elements of one encrypted chunk."""

SCALE_BYTES = 4
"""One quantisation scale."""

Tier = Literal["gpu", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryInputs:
    """What the bytes depend on."""

    stage: Literal[0, 1, 2, 3]
    """ZeRO stage."""

    world_size: int
    """[N] data-parallel ranks."""

    trainable_numel: int
    """[Psi] trainable elements of the whole model."""

    frozen_numel: int = 0
    """[Phi] frozen elements of the whole model."""

    largest_unit_numel: int = 0
    """[n_max] elements of the largest unit; 0 leaves all transients out."""

    root_numel: int = 0
    """[n_root] elements that stay replicated at stage 3."""

    compute_bytes: int = 2
    """[c] bytes of a parameter."""

    grad_bytes: int = 2
    """[a] bytes of a stored gradient element."""

    reduce_bytes: int = 2
    """[r] bytes of a gradient element on the wire."""

    optimizer_bytes: int = ADAM_STATE_BYTES
    """[K] bytes of optimizer state per element."""

    prefetch_units: int = 1
    """[d] units gathered ahead of use."""

    reduce_buffers: int = 2
    """[b] buffers of the gradient reduction in flight."""

    grads_fill_reduce_buffer: bool = False
    """Autograd writes straight into the reduction's input (possible when r == c)."""

    micro_steps: int = 1
    """Forward and backward passes per optimizer step."""

    optimizer_tier: Tier = "gpu"
    """Where optimizer states and stored gradients live."""

    param_tier: Tier = "gpu"
    """Where parameter shards live (stage 3)."""

    ring_tiles: int = 5
    """[R] tiles in the NVMe tier's ring."""

    ram_fraction: float = 0.0
    """[phi] fraction of the NVMe tier's states that stays in host memory, 0..1."""

    hpz_ranks: int = 1
    """[N_local] ranks of a secondary shard group; 1 = off."""

    quantized_weights: bool = False
    """Gather parameters as int8 (qwZ)."""

    quantized_gradients: bool = False
    """Reduce gradients as int4 (qgZ)."""

    quant_block_numel: int = 256
    """Elements that share one quantisation scale."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1; got {self.world_size}")
        if self.optimizer_tier != "gpu" and self.stage == 0:
            raise ValueError("optimizer_tier must be gpu at stage 0, where nothing is sharded; take stage 1")
        if self.param_tier != "gpu" and self.stage != 3:
            raise ValueError(f"param_tier must be gpu at stage {self.stage}; take stage 3")
        if not 0.0 <= self.ram_fraction <= 1.0:
            raise ValueError(f"ram_fraction must be within 0..1; got {self.ram_fraction}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPersistent:
    """Bytes on the accelerator (host memory when training on CPU) from the first step to the last."""

    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int
    frozen_bytes: int
    replicated_bytes: int
    """Small parameters that stay whole at stage 3."""
    secondary_bytes: int
    """Second copy of the shards within a node (hpZ)."""
    ring_bytes: int
    """Staging of offloaded states and parameters."""

    @property
    def total_bytes(self) -> int:
        return (
            self.param_bytes
            + self.grad_bytes
            + self.optimizer_bytes
            + self.frozen_bytes
            + self.replicated_bytes
            + self.secondary_bytes
            + self.ring_bytes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuTransient:
    """The most that each phase of a step adds, without activations."""

    forward_bytes: int
    backward_bytes: int
    step_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_bytes, self.backward_bytes, self.step_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBytes:
    """Host memory of offloaded states."""

    optimizer_bytes: int
    grad_bytes: int
    param_bytes: int
    ring_bytes: int
    tag_bytes: int
    """Tags and generations of encrypted chunks."""

    @property
    def total_bytes(self) -> int:
        return self.optimizer_bytes + self.grad_bytes + self.param_bytes + self.ring_bytes + self.tag_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTraffic:
    """Payload that one rank moves in one optimizer step. A ring sends (N - 1) / N of the network payload."""

    network_bytes: int
    cross_node_bytes: int
    """The part of it that leaves a secondary shard group (all of it without hpZ)."""
    pcie_up_bytes: int
    pcie_down_bytes: int
    nvme_bytes: int
    """Read plus written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBreakdown:
    """Everything one rank needs."""

    inputs: MemoryInputs
    gpu: GpuPersistent
    transient: GpuTransient
    host: HostBytes
    disk_bytes: int
    """Encrypted spill."""
    traffic: StepTraffic

    def gpu_peak_bytes(self, *, activation_bytes: int = 0, overhead_bytes: int = 0) -> int:
        """Highest bytes on the accelerator: persistent + worst phase + activations + context and channels."""
        return self.gpu.total_bytes + self.transient.peak_bytes + activation_bytes + overhead_bytes


def breakdown(inputs: MemoryInputs) -> MemoryBreakdown:
    """All tiers and phases of one rank, in bytes."""
    return MemoryBreakdown(
        inputs=inputs,
        gpu=gpu_persistent(inputs),
        transient=gpu_transient(inputs),
        host=host_bytes(inputs),
        disk_bytes=disk_bytes(inputs),
        traffic=step_traffic(inputs),
    )


def gpu_persistent(inputs: MemoryInputs) -> GpuPersistent:
    """What stays on the accelerator."""
    psi, ranks, c = inputs.trainable_numel, inputs.world_size, inputs.compute_bytes
    param_ranks = ranks if inputs.stage == 3 else 1
    grad_ranks = ranks if inputs.stage >= 2 else 1
    state_ranks = ranks if inputs.stage >= 1 else 1
    shard_of_largest = _share(inputs.largest_unit_numel, ranks)
    ring = 0
    if inputs.optimizer_tier != "gpu":
        ring += 2 * inputs.reduce_bytes * shard_of_largest
    if inputs.param_tier != "gpu":
        ring += c * (1 + inputs.prefetch_units) * shard_of_largest
    on_gpu = inputs.optimizer_tier == "gpu"
    return GpuPersistent(
        param_bytes=c * _share(psi, param_ranks) if inputs.param_tier == "gpu" else 0,
        grad_bytes=inputs.grad_bytes * _share(psi, grad_ranks) if on_gpu else 0,
        optimizer_bytes=inputs.optimizer_bytes * _share(psi, state_ranks) if on_gpu else 0,
        frozen_bytes=c * _share(inputs.frozen_numel, param_ranks),
        replicated_bytes=c * inputs.root_numel if inputs.stage == 3 else 0,
        secondary_bytes=c * _share(psi, inputs.hpz_ranks) if inputs.hpz_ranks > 1 else 0,
        ring_bytes=ring,
    )


def gpu_transient(inputs: MemoryInputs) -> GpuTransient:
    """What each phase adds on the accelerator. The update runs in place, so the step adds nothing."""
    n_max, c, r, b = (
        inputs.largest_unit_numel,
        inputs.compute_bytes,
        inputs.reduce_bytes,
        inputs.reduce_buffers,
    )
    reduction = r * b * n_max
    if inputs.quantized_gradients:
        reduction += _ceil(2 * n_max * _int4_bytes(inputs))
    if inputs.stage < 3:
        return GpuTransient(forward_bytes=0, backward_bytes=reduction, step_bytes=0)
    gathered = c * (1 + inputs.prefetch_units) * n_max
    if inputs.quantized_weights:
        gathered += _ceil(n_max * _int8_bytes(inputs))
    own_grads = 0 if inputs.grads_fill_reduce_buffer else c * n_max
    return GpuTransient(
        forward_bytes=gathered,
        backward_bytes=gathered + own_grads + reduction + r * _share(n_max, inputs.world_size),
        step_bytes=0,
    )


def host_bytes(inputs: MemoryInputs) -> HostBytes:
    """Host memory of offloaded states; all zero without offload."""
    shard = _share(inputs.trainable_numel, inputs.world_size)
    shard_of_largest = _share(inputs.largest_unit_numel, inputs.world_size)
    optimizer = ring = tags = 0
    if inputs.optimizer_tier == "cpu":
        optimizer = inputs.optimizer_bytes * shard
    elif inputs.optimizer_tier == "nvme":
        optimizer = _ceil(inputs.ram_fraction * inputs.optimizer_bytes * shard)
        ring += inputs.ring_tiles * inputs.optimizer_bytes * TILE_NUMEL
        tags = TAG_BYTES * -(-shard // TAG_CHUNK_NUMEL)
    if inputs.param_tier == "nvme":
        ring += inputs.compute_bytes * (1 + inputs.prefetch_units) * shard_of_largest
    return HostBytes(
        optimizer_bytes=optimizer,
        grad_bytes=inputs.grad_bytes * shard if inputs.optimizer_tier != "gpu" else 0,
        param_bytes=inputs.compute_bytes * shard if inputs.param_tier == "cpu" else 0,
        ring_bytes=ring,
        tag_bytes=tags,
    )


def disk_bytes(inputs: MemoryInputs) -> int:
    """Encrypted spill of one rank."""
    shard = _share(inputs.trainable_numel, inputs.world_size)
    params = inputs.compute_bytes * shard if inputs.param_tier == "nvme" else 0
    return params + optimizer_disk_bytes(inputs)


def optimizer_disk_bytes(inputs: MemoryInputs) -> int:
    """The optimizer states' part of the spill."""
    if inputs.optimizer_tier != "nvme":
        return 0
    shard = _share(inputs.trainable_numel, inputs.world_size)
    return _ceil((1.0 - inputs.ram_fraction) * inputs.optimizer_bytes * shard)


def step_traffic(inputs: MemoryInputs) -> StepTraffic:
    """Payload of one optimizer step: 2c per element below stage 3 and 3c at stage 3 when r == c."""
    psi, c, r = inputs.trainable_numel, inputs.compute_bytes, inputs.reduce_bytes
    shard = _share(psi, inputs.world_size)
    gather = _int8_bytes(inputs) if inputs.quantized_weights else float(c)
    reduce = _int4_bytes(inputs) if inputs.quantized_gradients else float(r)
    # Stages 0 and 1 keep whole gradients, so they reduce once; from stage 2 on every micro-step reduces.
    reductions = inputs.micro_steps if inputs.stage >= 2 else 1
    if inputs.stage == 0:
        network = cross = 2.0 * r
    elif inputs.stage < 3:
        network = cross = c + r * reductions
    else:
        network = inputs.micro_steps * (2 * gather + reduce)
        cross = inputs.micro_steps * ((1 if inputs.hpz_ranks > 1 else 2) * gather + reduce)
    alone = inputs.world_size == 1
    gathers = 2 * inputs.micro_steps  # of an offloaded parameter shard: each forward and each backward
    param_shard_bytes = c * shard
    nvme = 2 * optimizer_disk_bytes(inputs)
    if inputs.param_tier == "nvme":
        nvme += (gathers + 1) * param_shard_bytes
    moved = inputs.optimizer_tier != "gpu"
    up = param_shard_bytes if moved else 0
    if inputs.param_tier != "gpu":
        up = gathers * param_shard_bytes
    return StepTraffic(
        network_bytes=0 if alone else _ceil(network * psi),
        cross_node_bytes=0 if alone else _ceil(cross * psi),
        pcie_up_bytes=up,
        pcie_down_bytes=inputs.grad_bytes * shard if moved else 0,
        nvme_bytes=nvme,
    )


def padded_numel(numel: int, world_size: int, *, align: int = ALIGN_NUMEL) -> int:
    """Elements of a unit after padding to a multiple of `world_size * align`."""
    block = world_size * align
    return -(-numel // block) * block


def gpt_parameter_count(*, d_model: int, layers: int, context: int, vocab: int = 256) -> int:
    """Elements of the byte-level GPT: pre-norm blocks, biases, MLP of 4 d_model, positions, tied head."""
    attention = (3 * d_model * d_model + 3 * d_model) + (d_model * d_model + d_model)
    mlp = (4 * d_model * d_model + 4 * d_model) + (4 * d_model * d_model + d_model)
    norms = 2 * 2 * d_model
    embeddings = vocab * d_model + context * d_model
    final_norm = 2 * d_model
    return embeddings + layers * (attention + mlp + norms) + final_norm


def _share(numel: int, ranks: int) -> int:
    return -(-numel // ranks)


def _ceil(value: float) -> int:
    whole = int(value)
    return whole if whole == value else whole + 1


def _int8_bytes(inputs: MemoryInputs) -> float:
    return 1.0 + SCALE_BYTES / inputs.quant_block_numel


def _int4_bytes(inputs: MemoryInputs) -> float:
    return 0.5 + SCALE_BYTES / inputs.quant_block_numel
