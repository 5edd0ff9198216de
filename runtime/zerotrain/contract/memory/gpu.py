"""Bytes on the accelerator (host memory when training on CPU): the persistent ones, and each phase's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .inputs import (
    MASTER_BYTES,
    SUM_TILE_NUMEL,
    SUM_TILES,
    MemoryInputs,
    ceil,
    int4_bytes,
    int8_bytes,
    moved_gradients,
    offloaded,
    share,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPersistent:
    """Bytes on the accelerator (host memory when training on CPU) from the first step to the last."""

    param_bytes: int
    grad_bytes: int
    """Sums of gradients, which may exist for a part of each step alone; see `FreedSums`."""
    optimizer_bytes: int
    frozen_bytes: int
    replicated_bytes: int
    """Small parameters that stay whole at stage 3."""
    secondary_bytes: int
    """Second copy of the shards within a node (hpZ)."""

    @property
    def total_bytes(self) -> int:
        return (
            self.param_bytes
            + self.grad_bytes
            + self.optimizer_bytes
            + self.frozen_bytes
            + self.replicated_bytes
            + self.secondary_bytes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuTransient:
    """Largest addition of each phase of a step, without activations."""

    forward_bytes: int
    backward_bytes: int
    step_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_bytes, self.backward_bytes, self.step_bytes)


def gpu_persistent(inputs: MemoryInputs) -> GpuPersistent:
    """Return the bytes that stay on the accelerator."""
    psi, ranks, c = inputs.trainable_numel, inputs.world_size, inputs.compute_bytes
    is_shard = inputs.stage == 3 or (_shares_weights(inputs) and inputs.stage >= 1)
    param_ranks = ranks if is_shard else 1
    whole_ranks = ranks if _shares_weights(inputs) else 1
    grad_ranks = ranks if inputs.stage >= 2 or inputs.keeps_own_gradients else 1
    state_ranks = ranks if inputs.stage >= 1 else 1
    moved, on_gpu = offloaded(inputs), inputs.param_tier == "gpu"
    gone = moved_gradients(inputs)
    tile = min(SUM_TILE_NUMEL, max(gone, default=0))
    whole, frozen_whole = (inputs.root_numel, inputs.frozen_root_numel) if inputs.stage == 3 else (0, 0)
    return GpuPersistent(
        param_bytes=c * share(psi - whole, param_ranks) if on_gpu else 0,
        grad_bytes=inputs.grad_bytes * (share(psi, grad_ranks) - sum(gone) + SUM_TILES * tile),
        optimizer_bytes=_state_bytes(inputs, state_ranks)
        - inputs.optimizer_bytes * sum(moved.states)
        + MASTER_BYTES * moved.device_masters,
        frozen_bytes=c * share(inputs.frozen_numel - frozen_whole, param_ranks) if on_gpu else 0,
        replicated_bytes=c * share(whole + frozen_whole, whole_ranks),
        secondary_bytes=c * share(psi - whole + inputs.frozen_numel - frozen_whole, inputs.hpz_ranks)
        if inputs.hpz_ranks > 1
        else 0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FreedSums:
    """Bytes of a rank's own part of the sums of gradients, if it exists from a step's first reduction to its
    update alone, as on an accelerator. `GpuPersistent` counts them, too."""

    total_bytes: int = 0
    largest_bytes: int = 0
    """Bytes of the largest unit's sum."""


def freed_sums(inputs: MemoryInputs) -> FreedSums:
    """Return the sums that are freed between the update and the next reduction."""
    is_part = _stage(inputs) >= 2 or (inputs.keeps_own_gradients and inputs.world_size > 1)
    if inputs.on_host or not is_part:
        return FreedSums()
    ranks, moved = inputs.world_size, sum(moved_gradients(inputs))
    total = max(share(inputs.trainable_numel, ranks) - moved, 0)
    largest = min(share(inputs.largest_unit_numel, ranks), total)
    return FreedSums(total_bytes=inputs.grad_bytes * total, largest_bytes=inputs.grad_bytes * largest)


def _stage(inputs: MemoryInputs) -> int:
    """Return the stage that has an effect: one rank has no peers to shard with."""
    return 0 if inputs.world_size == 1 and inputs.param_tier == "gpu" else inputs.stage


def _shares_weights(inputs: MemoryInputs) -> bool:
    """Return whether gathered weights are in the memory of the rank that owns them."""
    is_plain = inputs.hpz_ranks == 1 and not inputs.quantized_weights
    return inputs.shares_memory and is_plain and inputs.param_tier != "nvme"


def _places(inputs: MemoryInputs) -> int:
    """Return the ranks in the first hop of a reduction: those of a node, or all if no node holds several."""
    return inputs.ranks_per_node if inputs.ranks_per_node > 1 else inputs.world_size


def _received_bytes(inputs: MemoryInputs, numel: int) -> int:
    """Return the bytes that a reduction of one unit receives beside the gradients that are sent."""
    places = _places(inputs)
    nodes, summed = inputs.world_size // places, share(numel, places)
    width = int4_bytes(inputs) if inputs.quantized_gradients else inputs.reduce_bytes
    hops = 2 * numel + (2 * summed if nodes > 1 else 0)
    if inputs.quantized_gradients:
        return ceil(width * hops) + 2 * 4 * summed
    if nodes > 1:
        return ceil(width * hops) + 4 * summed
    return 0 if inputs.shares_memory else inputs.reduce_bytes * numel


def _state_bytes(inputs: MemoryInputs, state_ranks: int) -> int:
    psi = inputs.trainable_numel
    sharded = inputs.optimizer_bytes * share(psi, state_ranks)
    return sharded + inputs.whole_state_bytes * psi + inputs.shard_state_bytes * share(psi, inputs.world_size)


def gpu_transient(inputs: MemoryInputs) -> GpuTransient:
    """Return the bytes that each phase adds on the accelerator. The update itself runs in place, except that
    orthogonal matrices wait for it when all gradients are reduced."""
    found = _exchange_transient(inputs)
    return replace(found, step_bytes=max(found.step_bytes, inputs.direction_bytes))


def _gathered_bytes(inputs: MemoryInputs, live_numel: int) -> int:
    """Return the bytes of the whole weights of live units at stage 3."""
    if _shares_weights(inputs):
        return 0
    n_max = inputs.largest_unit_numel
    gathered = inputs.compute_bytes * live_numel
    if inputs.quantized_weights:
        # The unit in use is decoded already; those gathered ahead exist as codes, too.
        packed = max(n_max, live_numel - inputs.whole_pass_numel - n_max)
        gathered += ceil(packed * int8_bytes(inputs))
    return gathered


def _exchange_transient(inputs: MemoryInputs) -> GpuTransient:
    """Return the phases of an all-to-all reduction.

    They hold full gradients of the units in backward or in flight, and the buffers that the exchange
    receives.
    """
    n_max, c = inputs.largest_unit_numel, inputs.compute_bytes
    stage = _stage(inputs)
    gathered = _gathered_bytes(inputs, inputs.forward_live_numel) if stage == 3 else 0
    if not inputs.trainable_numel:  # a model that is only evaluated
        return GpuTransient(forward_bytes=gathered, backward_bytes=0, step_bytes=0)
    received = 0 if inputs.world_size == 1 else _received_bytes(inputs, n_max)
    overlaps = inputs.reduce_buffers > 1 and inputs.world_size > 1
    is_sent_as_made = overlaps and inputs.micro_steps == 1 and inputs.grad_bytes != c
    is_sent_as_made = is_sent_as_made or (inputs.keeps_own_gradients and inputs.world_size > 1)
    is_sent_as_made = is_sent_as_made or inputs.moves_gradients
    if stage < 2 and not is_sent_as_made:
        # Autograd accumulates directly into whole fp32 gradients; narrower ones are added unit by unit.
        own = 0 if inputs.grad_bytes == c else c
        whole = own * inputs.whole_pass_grad_numel
        if overlaps:
            # One unit is in flight, another is in backward or joins it.
            joined = received + max(own * n_max, received)
            return GpuTransient(forward_bytes=gathered, backward_bytes=whole + joined, step_bytes=0)
        return GpuTransient(forward_bytes=gathered, backward_bytes=whole + own * n_max, step_bytes=received)
    grads = c * (inputs.reduce_buffers * n_max + inputs.whole_pass_grad_numel)
    live = _gathered_bytes(inputs, inputs.backward_live_numel) if stage == 3 else 0
    # The parts of one unit are on their way to the host beside those in flight.
    leaving = (received or c * n_max) if inputs.moves_gradients else 0
    backward = live + grads + inputs.reduce_buffers * received + leaving
    return GpuTransient(forward_bytes=gathered, backward_bytes=backward, step_bytes=0)
