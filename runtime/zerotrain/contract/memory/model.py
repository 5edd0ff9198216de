"""The memory inputs of this engine, from a resolved configuration and the sizes of the model's units.

The planner and the operator's admission get the sizes from `gpt_units` (no torch needed). The engine's own
accounting test gets them from the real layout, and compares the engine with these bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from zerotrain.contract.config import EngineConfig, OptimizerConfig, ZeroConfig

from .inputs import MemoryInputs
from .live import LiveRules, replay_live
from .modules import MIN_UNIT_NUMEL, ModuleSize, arrange_units
from .moved import keeps_own_gradients, moves_gradients, offload_tiers, offloaded_units, shards_parameters
from .sizes import DTYPE_BYTES, UnitSize

ACCUMULATOR_BYTES = 4
"""Bytes of a stored gradient element in fp32."""
BF16_BYTES = 2
"""Bytes of a gradient or an optimizer state in bf16."""
DIRECTION_BYTES = 2
"""Bytes of an element of an orthogonal matrix, which is bf16."""
MOMENT_BYTES = 4
"""Bytes of an element of an optimizer state in fp32."""
REMAINDER_BYTES = 2
"""Bytes of the lower half of a master whose upper half is the weight."""


def memory_inputs(
    config: EngineConfig,
    units: Sequence[UnitSize],
    *,
    shares_memory: bool = False,
    ranks_per_node: int = 0,
    on_host: bool = False,
    is_encrypted: bool = True,
) -> MemoryInputs:
    """Return the inputs of the byte formulas for one rank of this engine.

    Units are padded for `config.world_size`. Only a running engine knows `shares_memory` and `on_host` (there
    is no accelerator beside the CPU); the planner assumes that every rank has its own memory and accelerator.
    `ranks_per_node` 0 = all ranks are on one node.
    """
    zero, stage = config.zero, config.zero.stage
    compute_bytes = DTYPE_BYTES[config.precision.compute_dtype]
    wire_bytes = DTYPE_BYTES[config.precision.reduce_dtype]
    whole = list(_kept_whole(config, units, on_host))
    sharded = [unit for unit in units if unit not in whole]
    whole_pass = _total(unit for unit in sharded if unit.whole_pass)
    buffers = 2 if zero.overlap_comm else 1
    passing = tuple(unit.padded_numel for unit in sharded if not unit.whole_pass)
    live = replay_live(passing, whole_pass=whole_pass, rules=_live_rules(zero), reduce_buffers=buffers)
    # Whole sums are sent as they are, otherwise autograd's gradients. They are cast only to a narrower dtype.
    keeps_own, grad_bytes = keeps_own_gradients(config), _grad_bytes(config)
    reduce_bytes = min(wire_bytes, compute_bytes if keeps_own else grad_bytes)
    inputs = MemoryInputs(
        stage=stage,  # type: ignore[arg-type]  # the table of keys allows 0 to 3
        world_size=config.world_size,
        trainable_numel=_total(unit for unit in units if unit.trainable),
        frozen_numel=_frozen(units, compute_bytes),
        largest_unit_numel=max(passing, default=0),
        root_numel=_total(unit for unit in whole if unit.trainable),
        frozen_root_numel=_frozen(whole, compute_bytes),
        whole_pass_numel=whole_pass,
        whole_pass_grad_numel=_total(unit for unit in units if unit.whole_pass and unit.trainable),
        compute_bytes=compute_bytes,
        grad_bytes=grad_bytes,
        keeps_own_gradients=keeps_own and stage == 1,
        moves_gradients=moves_gradients(config, on_host=on_host),
        reduce_bytes=reduce_bytes,
        whole_state_bytes=MOMENT_BYTES * _whole_states(config),
        shard_state_bytes=MOMENT_BYTES if _whole_states(config) > 1 else 0,
        forward_live_numel=live.forward,
        backward_live_numel=live.backward,
        kept_live_numel=live.kept if stage == 3 else 0,
        reduce_buffers=buffers,
        shares_memory=shares_memory,
        hpz_ranks=zero.zero_hpz_partition_size if _has_secondary(config) else 1,
        quantized_weights=stage == 3 and zero.zero_quantized_weights and config.world_size > 1,
        quantized_gradients=stage >= 2 and zero.zero_quantized_gradients and config.world_size > 1,
        ranks_per_node=ranks_per_node,
        on_host=on_host,
        is_encrypted=is_encrypted,
        saves_in_background=config.checkpoint.asynchronous,
        micro_steps=config.batch.gradient_accumulation_steps,
    )
    return _with_states(inputs, config, units)


def _grad_bytes(config: EngineConfig) -> int:
    return BF16_BYTES if config.precision.bf16_masters else ACCUMULATOR_BYTES


def _with_states(inputs: MemoryInputs, config: EngineConfig, units: Sequence[UnitSize]) -> MemoryInputs:
    """Add the encoding of optimizer states and the offloaded part to the inputs."""
    tiers, precision = offload_tiers(config, on_host=inputs.on_host), config.precision
    state_bytes = optimizer_state_bytes(
        config.optimizer,
        compute_bytes=inputs.compute_bytes,
        splits_masters=precision.store_param_remainders,
        bf16_masters=precision.bf16_masters,
        bf16_states=precision.bf16_states,
    )
    return replace(
        inputs,
        optimizer_bytes=state_bytes,
        direction_bytes=_direction_bytes(config, units),
        splits_masters=precision.store_param_remainders,
        bf16_masters=precision.bf16_masters,
        optimizer_tier=tiers.states,
        param_tier=tiers.params,
        offloaded=offloaded_units(config, units, on_host=inputs.on_host),
    )


def _live_rules(zero: ZeroConfig) -> LiveRules:
    return LiveRules(
        prefetch=zero.prefetch_bucket_size,
        max_live=zero.max_live_parameters,
        max_reuse=zero.max_reuse_distance,
    )


def _has_secondary(config: EngineConfig) -> bool:
    return config.zero.stage == 3 and 1 < config.zero.zero_hpz_partition_size < config.world_size


def optimizer_state_bytes(
    optimizer: OptimizerConfig | None,
    *,
    compute_bytes: int,
    splits_masters: bool = False,
    bf16_masters: bool = False,
    bf16_states: bool = False,
) -> int:
    """Return [K]: the master weight and the moments of one element. None stands for AdamW.

    The master is fp32, unless the parameter itself is the master or half of it.
    """
    master = 0 if compute_bytes == 4 or bf16_masters else 4
    if splits_masters:
        master = REMAINDER_BYTES
    return master + (BF16_BYTES if bf16_states else MOMENT_BYTES) * _state_count(optimizer)


def _direction_bytes(config: EngineConfig, units: Sequence[UnitSize]) -> int:
    """Return the bytes of a rank's part of all matrices in bf16.

    A part may be nothing but matrices, and those that AdamW updates (embeddings) are not told apart, so this
    is an upper bound.
    """
    if config.optimizer is None or config.optimizer.type != "Muon":
        return 0
    ranks = config.world_size if config.zero.stage >= 1 else 1
    return DIRECTION_BYTES * sum(
        min(unit.numel if unit.matrix_numel is None else unit.matrix_numel, unit.padded_numel // ranks)
        for unit in units
        if unit.trainable
    )


def _state_count(optimizer: OptimizerConfig | None) -> int:
    """Return the number of states per element beside the master weight."""
    if optimizer is None:
        return 2
    if optimizer.type == "SGD":
        return 1 if optimizer.momentum else 0
    if optimizer.type == "RMSprop":
        return 1 + sum(bool(optimizer.params.get(name)) for name in ("momentum", "centered"))
    if optimizer.type in ("Lion", "Adagrad", "OneBitAdam", "ASGD"):
        return 1  # 1-bit Adam's momentum is not sharded, see _whole_states
    return 3 if optimizer.params.get("amsgrad") else 2


def _whole_states(config: EngineConfig) -> int:
    """Return the number of fp32 states that a rank holds for all elements.

    They are 1-bit Adam's momentum and, with several ranks, the error of its compression (the error of the
    average is per share).
    """
    if config.optimizer is None or config.optimizer.type != "OneBitAdam":
        return 0
    return 2 if config.world_size > 1 else 1


def gpt_parameter_count(*, d_model: int, layers: int, context: int, vocab: int = 256) -> int:
    """Return the elements of the byte-level GPT.

    It has pre-norm blocks, biases, an MLP of 4 d_model, positions and a tied head.
    """
    attention = (3 * d_model * d_model + 3 * d_model) + (d_model * d_model + d_model)
    mlp = (4 * d_model * d_model + 4 * d_model) + (4 * d_model * d_model + d_model)
    norms = 2 * 2 * d_model
    embeddings = vocab * d_model + context * d_model
    final_norm = 2 * d_model
    return embeddings + layers * (attention + mlp + norms) + final_norm


def gpt_units(
    *,
    d_model: int,
    layers: int,
    context: int,
    world_size: int,
    vocab: int = 256,
    min_unit_numel: int = MIN_UNIT_NUMEL,
    small: tuple[int, int] = (0, 0),
) -> tuple[UnitSize, ...]:
    """Return the units of the byte-level GPT as the engine lays it out, in its order; see `arrange_units`."""
    modules = gpt_modules(d_model=d_model, layers=layers, context=context, vocab=vocab)
    return arrange_units(modules, world_size=world_size, min_unit_numel=min_unit_numel, small=small)


def gpt_modules(*, d_model: int, layers: int, context: int, vocab: int = 256) -> tuple[ModuleSize, ...]:
    """Return the modules of the byte-level GPT.

    The embedding is tied to the head and so belongs to the model; the blocks are units.
    """
    return (
        ModuleSize(name="embed", parameters=(vocab * d_model,), is_tied=True),
        ModuleSize(name="position", parameters=(context * d_model,)),
        *(
            ModuleSize(name=f"blocks.{index}", parameters=tuple(_block_parameters(d_model)))
            for index in range(layers)
        ),
        ModuleSize(name="norm", parameters=(d_model, d_model)),
    )


def small_parameters(config: EngineConfig, *, on_host: bool = False) -> tuple[int, int]:
    """Return the limits (largest, total) of parameters that this configuration keeps whole, in elements."""
    zero = config.zero
    if not shards_parameters(config, on_host=on_host):
        return 0, 0
    return zero.param_persistence_threshold, zero.model_persistence_threshold


def _block_parameters(d: int) -> Iterator[int]:
    """Yield the elements of a block's parameters in the module's order: norm, qkv, out, norm, up, down."""
    for weight, bias in ((d, d), (3 * d * d, 3 * d), (d * d, d), (d, d), (4 * d * d, 4 * d), (4 * d * d, d)):
        yield weight
        yield bias


def _kept_whole(config: EngineConfig, units: Sequence[UnitSize], on_host: bool) -> Iterator[UnitSize]:
    """Yield the units of small parameters, which stay whole at stage 3."""
    if shards_parameters(config, on_host=on_host):
        yield from (unit for unit in units if unit.stays_whole)


def _total(units: Iterable[UnitSize]) -> int:
    return sum(unit.padded_numel for unit in units)


def _frozen(units: Iterable[UnitSize], compute_bytes: int) -> int:
    return sum(unit.weight_numel(compute_bytes) for unit in units if not unit.trainable)
