"""The units that leave the accelerator, by the engine's own rules: whole units in the order of the layout.

`memory_inputs` and the planner call it; the engine decides with the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerotrain.contract.config import EngineConfig
from zerotrain.contract.config.schema import OffloadConfig

from .inputs import Offloaded, Tier, fitting
from .sizes import DTYPE_BYTES, UnitSize


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadTiers:
    """Tiers of offloaded states and parameters."""

    states: Tier = "gpu"
    params: Tier = "gpu"


def offload_tiers(config: EngineConfig, *, on_host: bool) -> OffloadTiers:
    """Return the tiers of a configuration. `on_host`: the accelerator is the CPU itself."""
    states, params = config.zero.offload_optimizer, config.zero.offload_param
    if params is not None and params.device == "cpu" and on_host and config.world_size == 1:
        params = None  # one rank's weights are in host memory already
    return OffloadTiers(states=_tier(states), params=_tier(params) if config.zero.stage == 3 else "gpu")


def _tier(block: OffloadConfig | None) -> Tier:
    return "gpu" if block is None else block.device


def updates_just_in_time(
    asked: bool | None, *, tier: str, stage: int, world_size: int, on_cuda: bool
) -> bool:
    """Return whether steps of an element-wise optimizer return before their updates are done.

    `tier` is that of the states (none, cpu, nvme). If `asked` is given, it decides. Otherwise it is on if
    updates use a resource that a forward pass leaves idle: a processor beside a GPU, or a disk. Stages 1 and
    2 on several ranks stay synchronous unless `asked`: scripts read weights on one rank after a step, and a
    background update would make this require all ranks.
    """
    if tier == "none":
        return False
    if asked is not None:
        return asked
    needs_all_ranks = stage in (1, 2) and world_size > 1
    return not needs_all_ranks and (on_cuda or tier == "nvme")


def shards_parameters(config: EngineConfig, *, on_host: bool) -> bool:
    """Return whether parameters are shards between their uses: at stage 3 on several ranks or tiers."""
    if config.zero.stage < 3:
        return False
    return config.world_size > 1 or offload_tiers(config, on_host=on_host).params != "gpu"


def keeps_own_gradients(config: EngineConfig) -> bool:
    """Return whether a rank of several keeps no more than its own part of a step's sum of gradients.

    It does at stages 2 and 3, and at stage 1 if a step has one micro-batch, whose gradients are sent as
    backward computes them. Gradients in fp32 are summed where autograd writes them, and 1-bit Adam takes each
    rank's own.
    """
    if config.zero.stage != 1:
        return config.zero.stage > 1
    is_whole = config.precision.compute_dtype == "fp32" or (
        config.optimizer is not None and config.optimizer.type == "OneBitAdam"
    )
    has_one_pass = config.managed_gradient_accumulation and config.batch.gradient_accumulation_steps == 1
    return has_one_pass and not is_whole


def moves_gradients(config: EngineConfig, *, on_host: bool) -> bool:
    """Return whether gradients of offloaded states are summed in host memory, during backward.

    They are if a rank keeps its own part of them alone. Whole sums of several micro-batches stay on the
    accelerator, and so do sums that are in host memory there.
    """
    return _tier(config.zero.offload_optimizer) != "gpu" and not on_host and keeps_own_gradients(config)


def kept_states(sizes: Sequence[int], ratio: float) -> frozenset[int]:
    """Return the indices of trainable units whose states stay on the accelerator.

    They have at most 1 - ratio of all elements. They are taken from the front of the layout, since forward
    needs those units first.
    """
    return fitting(sizes, (1.0 - ratio) * sum(sizes) + 0.5)


def offloaded_units(config: EngineConfig, units: Sequence[UnitSize], *, on_host: bool) -> Offloaded | None:
    """Return the offloaded part of one rank's share, or None. `units` are in the order of the layout."""
    tiers = offload_tiers(config, on_host=on_host)
    if tiers == OffloadTiers():
        return None
    in_host, on_disk = _params(config, units, tiers)
    # Weights in host memory beside an accelerator, or on a disk, cannot be updated in place.
    has_left = on_disk if on_host else on_disk | in_host
    compute_bytes = DTYPE_BYTES[config.precision.compute_dtype]
    sizes = [unit.weight_numel(compute_bytes) // config.world_size for unit in units]
    return Offloaded(
        **_states(config, units, has_left if config.precision.compute_dtype == "fp32" else frozenset()),
        host_params=sum(sizes[index] for index in in_host),
        disk_params=tuple(sizes[index] for index in sorted(on_disk) if units[index].trainable),
        disk_frozen=tuple(sizes[index] for index in sorted(on_disk) if not units[index].trainable),
    )


def _states(config: EngineConfig, units: Sequence[UnitSize], masterless: frozenset[int]) -> dict[str, Any]:
    """Return the fields of the states. Weights of the units in `masterless` are not masters."""
    ranks = config.world_size if config.zero.stage >= 1 else 1
    trained = [index for index, unit in enumerate(units) if unit.trainable]
    sizes = [units[index].padded_numel // ranks for index in trained]
    block = config.zero.offload_optimizer
    is_moved = _tier(block) != "gpu"
    kept = kept_states(sizes, block.ratio if block is not None and is_moved else 0.0)
    moved = [place for place in range(len(trained)) if place not in kept]
    return {
        "states": tuple(sizes[place] for place in moved),
        "masters": frozenset(index for index, place in enumerate(moved) if trained[place] in masterless),
        "device_masters": sum(sizes[place] for place in kept if trained[place] in masterless),
    }


def _params(
    config: EngineConfig, units: Sequence[UnitSize], tiers: OffloadTiers
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the indices of the units whose parameters are in host memory, and in the spill."""
    sharded = [index for index, unit in enumerate(units) if not unit.stays_whole]
    if tiers.params == "gpu":
        return frozenset(), frozenset()
    if tiers.params == "cpu":
        return frozenset(sharded), frozenset()
    block = config.zero.offload_param
    sizes = [units[index].padded_numel // config.world_size for index in sharded]
    kept = fitting(sizes, block.max_in_cpu if block is not None else 0)
    in_host = frozenset(sharded[place] for place in kept)
    return in_host, frozenset(sharded) - in_host
