"""Which units leave the accelerator, by the engine's own rules: whole units, in the order of the layout.

Called by `memory_inputs`; the engine's tiers decide with the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerotrain.contract.config import EngineConfig
from zerotrain.contract.config.schema import OffloadConfig

from .inputs import Offloaded, Tier, fitting
from .sizes import UnitSize


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadTiers:
    """Where states and parameters live, as far as they are offloaded."""

    states: Tier = "gpu"
    params: Tier = "gpu"


def offload_tiers(config: EngineConfig, *, on_host: bool) -> OffloadTiers:
    """The tiers of a configuration. `on_host`: the accelerator is the CPU itself."""
    states, params = config.zero.offload_optimizer, config.zero.offload_param
    if params is not None and params.device == "cpu" and on_host and config.world_size == 1:
        params = None  # one rank's weights are in host memory already
    return OffloadTiers(states=_tier(states), params=_tier(params) if config.zero.stage == 3 else "gpu")


def _tier(block: OffloadConfig | None) -> Tier:
    return "gpu" if block is None else block.device


def shards_parameters(config: EngineConfig, *, on_host: bool) -> bool:
    """Whether parameters are shards between their uses: at stage 3 on several ranks or tiers."""
    if config.zero.stage < 3:
        return False
    return config.world_size > 1 or offload_tiers(config, on_host=on_host).params != "gpu"


def kept_states(sizes: Sequence[int], ratio: float) -> frozenset[int]:
    """Indices of the trainable units whose states stay on the accelerator: at most 1 - ratio of all elements.

    They are taken from the front of the layout, since the units that forward needs first can wait least.
    """
    return fitting(sizes, (1.0 - ratio) * sum(sizes) + 0.5)


def offloaded_units(config: EngineConfig, units: Sequence[UnitSize], tiers: OffloadTiers) -> Offloaded | None:
    """What of one rank's share is where, if anything is offloaded; `units` in the order of the layout."""
    if tiers == OffloadTiers():
        return None
    return Offloaded(
        states=_states(config, units) if tiers.states != "gpu" else (),
        **_params(config, units, tiers),
    )


def _states(config: EngineConfig, units: Sequence[UnitSize]) -> tuple[int, ...]:
    ranks = config.world_size if config.zero.stage >= 1 else 1
    sizes = [unit.padded_numel // ranks for unit in units if unit.trainable]
    block = config.zero.offload_optimizer
    kept = kept_states(sizes, block.ratio if block is not None else 1.0)
    return tuple(size for index, size in enumerate(sizes) if index not in kept)


def _params(config: EngineConfig, units: Sequence[UnitSize], tiers: OffloadTiers) -> dict[str, Any]:
    if tiers.params == "gpu":
        return {}
    sharded = [unit for unit in units if not unit.stays_whole]
    sizes = [unit.padded_numel // config.world_size for unit in sharded]
    if tiers.params == "cpu":
        return {"host_params": sum(sizes)}
    block = config.zero.offload_param
    kept = fitting(sizes, block.max_in_cpu if block is not None else 0)
    spilled = [
        (size, unit)
        for index, (size, unit) in enumerate(zip(sizes, sharded, strict=True))
        if index not in kept
    ]
    return {
        "host_params": sum(sizes[index] for index in kept),
        "disk_params": tuple(size for size, unit in spilled if unit.trainable),
        "disk_frozen": tuple(size for size, unit in spilled if not unit.trainable),
    }
