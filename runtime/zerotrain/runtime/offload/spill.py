"""Construction of a rank's storage outside of the device: the spill store, which optimizer states and weights
share, and the tier of the weights. Called by `setup` before the units are made, as their weights go there
first."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zerotrain.contract.config import ConfigError, EngineConfig
from zerotrain.contract.memory.moved import offload_tiers
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.offload.params import OffloadedParams
from zerotrain.runtime.offload.settings import spill_settings
from zerotrain.runtime.offload.uploads import WeightStaging
from zerotrain.runtime.spill.secrecy import refuse_cores

if TYPE_CHECKING:
    from zerotrain.runtime.spill.file import SpillLimit
    from zerotrain.runtime.spill.store import SpillStore


def open_spill_store(config: EngineConfig, comm: Comm) -> SpillStore | None:
    """Return the spill store of this rank, still without a file; None when nothing is offloaded to nvme.

    Raises ConfigError as `spill_settings`, and where this installation lacks the native module.
    """
    settings = spill_settings(config, os.environ, world_size=comm.world_size)
    if settings is None:
        return None
    try:
        from zerotrain.runtime.spill.file import SpillPlace
        from zerotrain.runtime.spill.seal import Encryption, SpillIdentity
        from zerotrain.runtime.spill.sealers import create_sealer
        from zerotrain.runtime.spill.store import SpillStore
    except ImportError as error:
        block = "offload_param" if config.zero.offload_optimizer is None else "offload_optimizer"
        raise ConfigError(
            f"zero_optimization.{block}.device",
            f"needs the native module, which this installation lacks ({error})",
            "nvme",
            'Install a platform wheel, or set it to "cpu".',
        ) from error
    identity = SpillIdentity(job=settings.job, rank=comm.rank, world_size=comm.world_size)
    place = SpillPlace(
        folders=settings.folders,
        limit=None if settings.limit_bytes is None else _limit(settings.limit_bytes),
        queue_depth=settings.queue_depth,
        request_bytes=settings.request_bytes,
    )
    refuse_cores()  # before the key exists
    sealer = create_sealer(Encryption(settings.encryption), identity)
    return SpillStore(place, sealer=sealer, identity=identity)


_limits: dict[int, SpillLimit] = {}
"""Limits of this process by their bytes, as several engines share the rank's part of the volume."""


def _limit(num_bytes: int) -> SpillLimit:
    """Return the limit of one spill store, within the process's limit."""
    from zerotrain.runtime.spill.file import SpillLimit

    return SpillLimit(num_bytes, within=_limits.setdefault(num_bytes, SpillLimit(num_bytes)))


def make_staging(config: EngineConfig, comm: Comm) -> WeightStaging | None:
    """Return the staging buffers for an accelerator's weights that rules on the host update; None without
    such rules."""
    block = config.zero.offload_optimizer
    if block is None or comm.device.type == "cpu":
        return None
    return WeightStaging(comm.device, pins=block.pin_memory)


def make_param_tier(
    config: EngineConfig, comm: Comm, spill_store: SpillStore | None
) -> OffloadedParams | None:
    """Return the tier of the weights; None where they stay on the device."""
    block = config.zero.offload_param
    where = offload_tiers(config, on_host=comm.device.type == "cpu").params
    if block is None or where == "gpu":
        return None
    return OffloadedParams(
        comm.device,
        spill_store=spill_store if where == "nvme" else None,
        host_numel=block.max_in_cpu,
        pins=block.pin_memory and comm.device.type == "cuda",
    )
