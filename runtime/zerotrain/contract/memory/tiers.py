"""Bytes beyond the accelerator: host memory, disk, and the traffic of a step."""

from __future__ import annotations

from dataclasses import dataclass

from .inputs import (
    CHUNK_NUMEL,
    DOWNLOAD_BUFFERS,
    PAGE_BYTES,
    PARAM_CHUNK_BYTES,
    PLAIN_TAG_BYTES,
    READ_BUFFERS,
    TAG_BYTES,
    TILE_NUMEL,
    UPDATE_BUFFERS,
    UPLOAD_BUFFERS,
    MemoryInputs,
    Offloaded,
    ceil,
    int4_bytes,
    int8_bytes,
    moved_gradients,
    offloaded,
    share,
    state_records,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBytes:
    """Host memory of offloaded states, and of a checkpoint that is being written."""

    optimizer_bytes: int
    grad_bytes: int
    param_bytes: int
    ring_bytes: int
    tag_bytes: int
    """Tags and generations of encrypted chunks."""
    snapshot_bytes: int = 0
    """Copy of the states from which checkpoints are written in the background, from the first one on."""

    @property
    def total_bytes(self) -> int:
        held = self.optimizer_bytes + self.grad_bytes + self.param_bytes + self.ring_bytes + self.tag_bytes
        return held + self.snapshot_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkPhases:
    """Network payload of one rank in one optimizer step, by the phase that waits for it."""

    forward_bytes: int = 0
    """Weights that forward passes gather."""
    backward_bytes: int = 0
    """Weights that backward passes gather, and gradients."""
    step_bytes: int = 0
    """Updated weights that are gathered once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTraffic:
    """Payload that one rank moves in one optimizer step.

    A ring sends (N - 1) / N of the network payload.
    """

    network_bytes: int
    cross_node_bytes: int
    """Part of the payload that leaves a secondary shard group (all of it without hpZ)."""
    pcie_up_bytes: int
    pcie_down_bytes: int
    nvme_bytes: int
    """Bytes read plus written."""
    nvme_pass_bytes: int
    """Part that forward and backward passes read; the update reads and writes the rest."""
    phases: NetworkPhases
    """Network payload by phase; the sum is `network_bytes`, apart from rounding."""


def host_bytes(inputs: MemoryInputs) -> HostBytes:
    """Return the host memory of offloaded states and parameters, and of background saves.

    Without offload the former is zero.
    """
    moved, spills = offloaded(inputs), "nvme" in (inputs.optimizer_tier, inputs.param_tier)
    return HostBytes(
        optimizer_bytes=_moved_state_bytes(inputs) if inputs.optimizer_tier == "cpu" else 0,
        grad_bytes=_host_grads(inputs, moved),
        param_bytes=inputs.compute_bytes * moved.host_params,
        ring_bytes=_state_ring(inputs) + _param_ring(inputs, moved) + _weight_ring(inputs, moved),
        tag_bytes=_tags(inputs, moved),
        # A spill is written out as it is read, without a full copy.
        snapshot_bytes=snapshot_bytes(inputs) if inputs.saves_in_background and not spills else 0,
    )


def _host_grads(inputs: MemoryInputs, moved: Offloaded) -> int:
    """Return the bytes of gradients in host memory: their sums, or a ring in which they go to the update unit
    by unit."""
    if inputs.on_host:
        return 0
    if inputs.moves_gradients:
        return inputs.grad_bytes * sum(moved_gradients(inputs))
    return DOWNLOAD_BUFFERS * inputs.grad_bytes * max(moved.states, default=0)


def _state_ring(inputs: MemoryInputs) -> int:
    """Return the bytes of tiles in transit between the spill and the update."""
    if inputs.optimizer_tier != "nvme":
        return 0
    largest = max((min(numel, TILE_NUMEL) * width for numel, width in state_records(inputs)), default=0)
    return inputs.ring_tiles * _pages(largest)


def _param_ring(inputs: MemoryInputs, moved: Offloaded) -> int:
    """Return the bytes of whole shards in transit to a gather, and through the update."""
    trainable = max(moved.disk_params, default=0)
    largest = max(trainable, max(moved.disk_frozen, default=0))
    c = inputs.compute_bytes
    return READ_BUFFERS * _pages(c * largest) + UPDATE_BUFFERS * _pages(c * trainable)


def _weight_ring(inputs: MemoryInputs, moved: Offloaded) -> int:
    """Return the bytes of weights that are updated in host memory, in transit to their accelerator."""
    if inputs.on_host or inputs.param_tier != "gpu":
        return 0
    return UPLOAD_BUFFERS * inputs.compute_bytes * max(moved.states, default=0)


def _tags(inputs: MemoryInputs, moved: Offloaded) -> int:
    """Return the bytes that prove, for every chunk of the spill, that it is the one written last."""
    states = state_records(inputs) if inputs.optimizer_tier == "nvme" else ()
    chunks = sum(-(-numel // CHUNK_NUMEL) for numel, width in states if width)
    for numel in (*moved.disk_params, *moved.disk_frozen):
        chunks += -(-inputs.compute_bytes * numel // PARAM_CHUNK_BYTES)
    return chunks * (TAG_BYTES if inputs.is_encrypted else PLAIN_TAG_BYTES)


def _pages(num_bytes: int) -> int:
    """Round up to whole pages, as a buffer of direct I/O requires."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def snapshot_bytes(inputs: MemoryInputs) -> int:
    """Return the bytes that a rank stores in a checkpoint.

    They are its share of master weights, states and frozen weights.
    """
    master = 4 if inputs.compute_bytes == 4 else 0  # otherwise among the optimizer's bytes
    if inputs.reads_weights:
        master = 2  # the weight, which is the master or half of it
    # Of 1-bit Adam's whole states the momentum is equal on all ranks, but each rank has its own errors.
    momentum = min(4, inputs.whole_state_bytes)
    errors = (inputs.whole_state_bytes - momentum) * inputs.trainable_numel
    state = master + inputs.optimizer_bytes + momentum + inputs.shard_state_bytes
    frozen = inputs.compute_bytes * share(inputs.frozen_numel, inputs.world_size)
    return state * share(inputs.trainable_numel, inputs.world_size) + errors + frozen


def disk_bytes(inputs: MemoryInputs) -> int:
    """Return the bytes of one rank's spill. Encryption adds none, and chunks need no padding."""
    moved = offloaded(inputs)
    params = sum(_pages(inputs.compute_bytes * numel) for numel in (*moved.disk_params, *moved.disk_frozen))
    return params + optimizer_disk_bytes(inputs)


def optimizer_disk_bytes(inputs: MemoryInputs) -> int:
    """Return the optimizer states' part of the spill."""
    return _moved_state_bytes(inputs) if inputs.optimizer_tier == "nvme" else 0


def _moved_state_bytes(inputs: MemoryInputs) -> int:
    return sum(numel * width for numel, width in state_records(inputs))


def step_traffic(inputs: MemoryInputs) -> StepTraffic:
    """Return the payload of one optimizer step: 2c per element below stage 3 and 3c at stage 3 when r == c.

    Frozen elements are gathered only: 2c at stage 3, nothing below. At stage 3 small parameters are gathered
    once per step, and units that stay whole from forward to backward once per micro-step. Bytes that cross
    nodes are those of a whole node.
    """
    forward, backward, step = _network(inputs)
    cross = _cross_node(inputs)
    alone = inputs.world_size == 1
    up, down = (0, 0) if inputs.on_host else _transfers(inputs)
    phases = NetworkPhases(forward_bytes=ceil(forward), backward_bytes=ceil(backward), step_bytes=ceil(step))
    passes, updates = _param_spill_traffic(inputs)
    return StepTraffic(
        network_bytes=0 if alone else ceil(forward + backward + step),
        cross_node_bytes=0 if alone else ceil(cross),
        pcie_up_bytes=up,
        pcie_down_bytes=down,
        # Before an update, Muon reads momenta, which share their chunks with the other states.
        nvme_bytes=(3 if inputs.direction_bytes else 2) * optimizer_disk_bytes(inputs) + updates + passes,
        nvme_pass_bytes=passes,
        phases=NetworkPhases() if alone else phases,
    )


def _network(inputs: MemoryInputs) -> tuple[float, float, float]:
    """Return the payload of forward, of backward, and of the update and the gather of updated weights."""
    forward, backward, step = _gathers_and_sums(inputs)
    # Each part of a matrix goes to the matrix's owner and comes back; a rank sends its share.
    parts = 2.0 * inputs.direction_bytes if inputs.stage >= 1 else 0.0
    return forward, backward, step + parts


def _gathers_and_sums(inputs: MemoryInputs) -> tuple[float, float, float]:
    psi, c, r = inputs.trainable_numel, inputs.compute_bytes, inputs.reduce_bytes
    if inputs.stage == 0:
        return 0.0, 2.0 * r * psi, 0.0
    if inputs.stage < 3:
        # Stage 1 keeps whole gradients, so it reduces once; from stage 2 on every micro-step reduces.
        return 0.0, float(r * psi * (inputs.micro_steps if inputs.stage == 2 else 1)), float(c * psi)
    micro, gather = inputs.micro_steps, _gather_bytes(inputs)
    forward = _gathered_numel(inputs)
    backward = forward - inputs.kept_live_numel
    # With a second copy nearby, weights cross the network once per step; later gathers are unquantised, from
    # the copy.
    again = c if inputs.hpz_ranks > 1 else gather
    gathered = gather * forward + again * (micro - 1) * forward
    return gathered, again * micro * backward + _reduced(inputs), float(c * inputs.root_numel)


def _cross_node(inputs: MemoryInputs) -> float:
    if inputs.stage < 3 or inputs.hpz_ranks == 1:
        return sum(_network(inputs))
    gathered = _gather_bytes(inputs) * _gathered_numel(inputs)
    return gathered + _reduced(inputs) + inputs.compute_bytes * inputs.root_numel


def _gathered_numel(inputs: MemoryInputs) -> int:
    """Return the elements that a pass gathers at stage 3, frozen ones included."""
    trained = inputs.trainable_numel - inputs.root_numel
    return trained + inputs.frozen_numel - inputs.frozen_root_numel


def _gather_bytes(inputs: MemoryInputs) -> float:
    return int8_bytes(inputs) if inputs.quantized_weights else float(inputs.compute_bytes)


def _reduced(inputs: MemoryInputs) -> float:
    """Return the payload of the gradients of all micro-steps at stage 3."""
    width = int4_bytes(inputs) if inputs.quantized_gradients else float(inputs.reduce_bytes)
    return inputs.micro_steps * width * inputs.trainable_numel


def _transfers(inputs: MemoryInputs) -> tuple[int, int]:
    """Return (up, down) between host and accelerator: gradients go down, updated weights come up.

    A weight that is its master or half of it goes down, too. An offloaded weight comes up for every pass
    instead. Sums in host memory go down after every pass, and come up before every further one of a step.
    """
    moved, c = offloaded(inputs), inputs.compute_bytes
    states, gone = sum(moved.states), inputs.grad_bytes * sum(moved_gradients(inputs))
    further = gone * (inputs.micro_steps - 1)
    down = (inputs.grad_bytes + (c if inputs.reads_weights and inputs.param_tier == "gpu" else 0)) * states
    if inputs.param_tier == "gpu":
        return c * states + further, down + further
    return c * _passes(inputs) + further, down + further


def _passes(inputs: MemoryInputs) -> int:
    """Return the elements of offloaded parameters that all passes of a step request from a rank."""
    moved = offloaded(inputs)
    numel = moved.host_params + sum(moved.disk_params) + sum(moved.disk_frozen)
    kept = share(inputs.kept_live_numel, inputs.world_size)
    return inputs.micro_steps * (2 * numel - kept)


def _param_spill_traffic(inputs: MemoryInputs) -> tuple[int, int]:
    """Return (passes, updates): the bytes of parameters in the spill that are read or written.

    Each pass reads them, each update writes them, and an update that needs the old weight reads it. Data that
    is still in a buffer is not read again, so this is an upper bound.
    """
    moved, c = offloaded(inputs), inputs.compute_bytes
    on_disk = sum(moved.disk_params) + sum(moved.disk_frozen)
    if not on_disk:
        return 0, 0
    kept = min(share(inputs.kept_live_numel, inputs.world_size), on_disk)
    passes = inputs.micro_steps * (2 * on_disk - kept)
    return c * passes, c * (2 if inputs.reads_weights else 1) * sum(moved.disk_params)
