"""The inputs of the byte formulas, and the arithmetic that the formulas share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ALIGN_NUMEL = 2048
"""Elements of which a rank's shard of a unit is a multiple."""

ADAM_STATE_BYTES = 12
"""[K] fp32 master weight, first and second moment, bytes per element."""

TILE_NUMEL = 1 << 20
"""[T] elements of one tile of the NVMe tier."""

TAG_BYTES = 28
"""Host memory per encrypted chunk: its tag, its nonce and its generation."""

PLAIN_TAG_BYTES = 1
"""Host memory per chunk of an unencrypted spill: whether it was written."""

CHUNK_NUMEL = 16_384
"""Elements of one chunk of states, the unit of encryption."""

PARAM_CHUNK_BYTES = 1 << 17
"""Bytes of one chunk of spilled parameters."""

PAGE_BYTES = 4096
"""Size of which buffers and offsets of direct I/O are multiples."""

DOWNLOAD_BUFFERS = 3
"""Buffers for gradients of whole units: being copied down, copied, and read by the update."""

SUM_TILES = 2
"""Tiles on the accelerator through which sums of gradients go to the host."""

SUM_TILE_NUMEL = 1 << 24
"""Elements of such a tile."""

UPLOAD_BUFFERS = 2
"""Buffers for updated weights of whole units: being copied up, and in the update."""

READ_BUFFERS = 2
"""Buffers for spilled parameters before a gather: in use, and read ahead."""

UPDATE_BUFFERS = 3
"""Buffers for spilled parameters in the update: read ahead, in the update, written behind."""

MASTER_BYTES = 4
"""Bytes of a master weight."""

SCALE_BYTES = 4
"""Bytes of one quantisation scale."""

Tier = Literal["gpu", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloaded:
    """Part of one rank's share that is off the accelerator, in elements.

    Records are listed by unit.
    """

    states: tuple[int, ...] = ()
    """Units whose optimizer states are offloaded."""

    masters: frozenset[int] = frozenset()
    """Indices into `states` of units whose fp32 weights are offloaded.

    Their states include a master weight.
    """

    device_masters: int = 0
    """Trainable elements with offloaded fp32 weights but states on the accelerator."""

    host_params: int = 0
    """Parameters in host memory, frozen ones included."""

    disk_params: tuple[int, ...] = ()
    """Trainable units whose parameters are in the spill."""

    disk_frozen: tuple[int, ...] = ()
    """Frozen units in the spill."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryInputs:
    """The values that determine the bytes."""

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
    """[n_root] trainable elements whose parameters stay whole at stage 3 (small units)."""

    frozen_root_numel: int = 0
    """Frozen elements that stay whole at stage 3."""

    whole_pass_numel: int = 0
    """Elements of sharded units that are whole from the first to the last use of a pass (tied weights)."""

    whole_pass_grad_numel: int = 0
    """Elements of units whose gradients are open from the first to the last use of a pass.

    They are the trainable ones of `whole_pass_numel`, and small units of the model itself.
    """

    compute_bytes: int = 2
    """[c] bytes of a parameter."""

    grad_bytes: int = 2
    """[a] bytes of a stored gradient element."""

    keeps_own_gradients: bool = False
    """Whether a rank keeps no more than its part of the gradients at stage 1, as at stages 2 and 3."""

    moves_gradients: bool = False
    """Whether gradients of offloaded states are summed in host memory, during backward."""

    reduce_bytes: int = 2
    """[r] bytes of a reduced gradient element."""

    optimizer_bytes: int = ADAM_STATE_BYTES
    """[K] bytes of optimizer state per element while an fp32 weight is on the accelerator."""

    whole_state_bytes: int = 0
    """Bytes of optimizer state per element that every rank holds for all elements (1-bit Adam)."""

    shard_state_bytes: int = 0
    """Bytes of optimizer state per element of a rank's share, at every stage (1-bit Adam)."""

    direction_bytes: int = 0
    """Bytes of a rank's part of all matrices, which an update makes orthogonal before it changes any state
    (Muon)."""

    saves_in_background: bool = False
    """Whether checkpoints are written from a copy of the rank's share while training goes on."""

    forward_live_numel: int = 0
    """Elements of sharded units that are whole at once in forward."""

    backward_live_numel: int = 0
    """Elements of sharded units that are whole at once in backward."""

    kept_live_numel: int = 0
    """Elements of sharded units that stay whole from forward to backward, so that one gather is enough."""

    reduce_buffers: int = 2
    """[b] buffers of the gradient reduction in flight."""

    shares_memory: bool = False
    """Whether all ranks are on one host and read each other's weights and gradients in place (CPU only).

    Each weight is then held by one rank only, and nothing is received.
    """

    micro_steps: int = 1
    """Forward and backward passes per optimizer step."""

    splits_masters: bool = False
    """Whether the bf16 weight is the upper half of its master.

    `optimizer_bytes` then holds the rest.
    """

    bf16_masters: bool = False
    """Whether the bf16 weight is its own master."""

    optimizer_tier: Tier = "gpu"
    """Tier of the offloaded optimizer states."""

    param_tier: Tier = "gpu"
    """Tier of the parameter shards (stage 3)."""

    offloaded: Offloaded | None = None
    """Part that is off the accelerator; None = all that the tiers imply, in one record each."""

    on_host: bool = False
    """Whether the accelerator is the host's own CPU.

    Gradients are then read in place, and nothing is transferred.
    """

    is_encrypted: bool = True
    """Whether the spill is encrypted."""

    ring_tiles: int = 5
    """[R] tiles in the NVMe tier's ring."""

    hpz_ranks: int = 1
    """[N_local] ranks of a secondary shard group; 1 = off."""

    quantized_weights: bool = False
    """Whether to gather parameters as int8 (qwZ)."""

    quantized_gradients: bool = False
    """Whether to reduce gradients as int4 (qgZ)."""

    ranks_per_node: int = 0
    """Ranks that sum their gradients before these cross to other nodes; 0 = all ranks are on one node."""

    quant_block_numel: int = 256
    """Elements that share one quantisation scale."""

    @property
    def reads_weights(self) -> bool:
        """Whether the update reads weights of compute precision, as they are masters or parts of them."""
        return self.splits_masters or self.bf16_masters

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1; got {self.world_size}")
        if self.param_tier != "gpu" and self.stage != 3:
            raise ValueError(f"param_tier must be gpu at stage {self.stage}; take stage 3")


def padded_numel(numel: int, world_size: int, *, align: int = ALIGN_NUMEL) -> int:
    """Return the elements of a unit after padding to a multiple of `world_size * align`."""
    block = world_size * align
    return -(-numel // block) * block


def offloaded(inputs: MemoryInputs) -> Offloaded:
    """Return the part of a rank's share that is off the accelerator."""
    if inputs.offloaded is not None:
        return inputs.offloaded
    state_ranks = inputs.world_size if inputs.stage >= 1 else 1
    params = share(inputs.trainable_numel - inputs.root_numel, inputs.world_size)
    frozen = share(inputs.frozen_numel - inputs.frozen_root_numel, inputs.world_size)
    spills, stays = inputs.param_tier == "nvme", inputs.optimizer_tier == "gpu"
    has_left = spills or (inputs.param_tier == "cpu" and not inputs.on_host)
    needs_master = has_left and inputs.compute_bytes == MASTER_BYTES
    return Offloaded(
        states=() if stays else (share(inputs.trainable_numel, state_ranks),),
        masters=frozenset({0}) if needs_master and not stays else frozenset(),
        device_masters=params if needs_master and stays else 0,
        host_params=params + frozen if inputs.param_tier == "cpu" else 0,
        disk_params=(params,) if spills else (),
        disk_frozen=(frozen,) if spills and frozen else (),
    )


def state_records(inputs: MemoryInputs) -> tuple[tuple[int, int], ...]:
    """Return (elements, bytes per element) of the units whose optimizer states are offloaded."""
    moved, width = offloaded(inputs), inputs.optimizer_bytes
    return tuple(
        (numel, width + (MASTER_BYTES if index in moved.masters else 0))
        for index, numel in enumerate(moved.states)
    )


def moved_gradients(inputs: MemoryInputs) -> tuple[int, ...]:
    """Return the elements of the units whose gradients are summed in host memory."""
    if not inputs.moves_gradients:
        return ()
    return tuple(numel for numel, width in state_records(inputs) if width)


def fitting(sizes: Sequence[int], budget: float) -> frozenset[int]:
    """Return the indices of the units that a budget of elements keeps: in order, each that still fits."""
    kept, left = set(), budget
    for index, size in enumerate(sizes):
        if size <= left:
            kept.add(index)
            left -= size
    return frozenset(kept)


def share(numel: int, ranks: int) -> int:
    """Return the elements of one rank of several, rounded up."""
    return -(-numel // ranks)


def ceil(value: float) -> int:
    whole = int(value)
    return whole if whole == value else whole + 1


def int8_bytes(inputs: MemoryInputs) -> float:
    return 1.0 + SCALE_BYTES / inputs.quant_block_numel


def int4_bytes(inputs: MemoryInputs) -> float:
    return 0.5 + SCALE_BYTES / inputs.quant_block_numel
