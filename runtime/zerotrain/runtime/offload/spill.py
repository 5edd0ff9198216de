"""The spill store of this rank, which optimizer states and weights share, and its settings.

The settings are from the configuration, the launch environment, or both; the check of what fits reads them,
too. The operator rejects the same contradictions before anything starts. `setup` opens the store before the
units are made, as their weights go there first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from zerotrain.contract.config import ConfigError, EngineConfig
from zerotrain.contract.config.schema import Encryption
from zerotrain.contract.worker_environment import SpillEnv
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.spill.secrecy import refuse_cores

if TYPE_CHECKING:
    from zerotrain.runtime.spill.file import SpillLimit
    from zerotrain.runtime.spill.store import SpillStore

_ZERO = "zero_optimization"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpillSettings:
    """Folders of this rank's spill, its size limit, and how it is sealed and written."""

    folders: tuple[Path, ...]
    folders_from: str
    """The key or the variable that names the folders."""
    limit_bytes: int | None
    """Limit of all files of this rank together; None = the space of the disk."""
    encryption: Encryption
    job: str
    """Identity of the job, bound into every sealed chunk to tell its spill from that of other jobs."""
    queue_depth: int
    request_bytes: int


def spills(config: EngineConfig) -> bool:
    """Return whether anything is offloaded to nvme."""
    blocks = (config.zero.offload_optimizer, config.zero.offload_param)
    return any(block is not None and block.device == "nvme" for block in blocks)


def spill_settings(
    config: EngineConfig, environ: Mapping[str, str], *, world_size: int
) -> SpillSettings | None:
    """Return the settings of this rank; None when nothing is offloaded to nvme.

    Raises ConfigError for a spill without a folder, for a folder that is not on the job's volume and for an
    encryption that the job contradicts, LaunchError for an unreadable environment.
    """
    if not spills(config):
        return None
    env = SpillEnv.from_env(environ)
    folders, folders_from = _folders(config, env)
    if env.nvme_volume is not None:
        folders = tuple(_on_volume(folder, env.nvme_volume, folders_from) for folder in folders)
    return _settings(config, env, folders, folders_from, world_size=world_size)


def _on_volume(folder: Path, volume: Path, folders_from: str) -> Path:
    """Return the folder without symbolic links. Raises ConfigError where that is not on the volume."""
    found, root = Path(os.path.realpath(folder)), Path(os.path.realpath(volume))
    if found.is_relative_to(root) and _device(found) == _device(root):
        return found
    raise ConfigError(
        folders_from,
        f"must name folders on the job's NVMe volume {volume} (spec.nvme), and this one is {found}",
        str(folder),
        "Name folders below it that no symbolic link and no other mount leads out of, or remove the key.",
    )


def _device(folder: Path) -> int:
    """Return the number of the file system that the folder is on, or will be made on."""
    return next(parent for parent in (folder, *folder.parents) if os.path.exists(parent)).stat().st_dev


def possible_spill(config: EngineConfig, environ: Mapping[str, str], *, world_size: int) -> SpillSettings:
    """Return the settings as if something were offloaded to nvme; no folders where none is known."""
    env = SpillEnv.from_env(environ)
    folders = tuple(map(Path, config.zero.spill.paths)) or ((env.nvme_path,) if env.nvme_path else ())
    return _settings(config, env, folders, "", world_size=world_size)


def _settings(
    config: EngineConfig, env: SpillEnv, folders: tuple[Path, ...], folders_from: str, *, world_size: int
) -> SpillSettings:
    # Without a launcher the number of ranks that share the volume is unknown: assume all of them.
    sharers = env.local_world_size or world_size
    limits = [config.zero.spill.max_bytes, None if env.nvme_bytes is None else env.nvme_bytes // sharers]
    return SpillSettings(
        folders=folders,
        folders_from=folders_from,
        limit_bytes=min((limit for limit in limits if limit is not None), default=None),
        encryption=_encryption(config, env),
        job=env.job_uid or env.job or "local",
        queue_depth=config.aio.queue_depth,
        request_bytes=config.aio.block_size,
    )


def _folders(config: EngineConfig, env: SpillEnv) -> tuple[tuple[Path, ...], str]:
    """Return the folders, and the key or variable that names them."""
    zero = config.zero
    if zero.spill.paths:
        return tuple(Path(folder).absolute() for folder in zero.spill.paths), f"{_ZERO}.spill.paths"
    blocks = {"offload_optimizer": zero.offload_optimizer, "offload_param": zero.offload_param}
    named = {
        name: block.nvme_path
        for name, block in blocks.items()
        if block is not None and block.device == "nvme" and block.nvme_path
    }
    if named:
        folders = tuple(Path(folder).absolute() for folder in dict.fromkeys(named.values()))
        return folders, f"{_ZERO}.{next(iter(named))}.nvme_path"
    if env.nvme_path is not None:
        return (env.nvme_path.absolute(),), "ZEROTRAIN_NVME_PATH"
    block = "offload_param" if zero.offload_optimizer is None else "offload_optimizer"
    raise ConfigError(
        f"{_ZERO}.{block}.nvme_path",
        "must name a folder on a fast local disk, as the launch environment gives none",
        None,
        "Write nvme_path or spill.paths, or give the job spec.nvme.",
    )


def _encryption(config: EngineConfig, env: SpillEnv) -> Encryption:
    requested, by_job = config.zero.spill.encryption, env.nvme_encryption
    if requested is not None and by_job is not None and requested != by_job:
        raise ConfigError(
            f"{_ZERO}.spill.encryption",
            f"must equal the job's, which is {by_job} (ZEROTRAIN_NVME_ENCRYPTION, spec.nvme.encryption)",
            requested,
            "Give it in one place only.",
        )
    return requested or cast(Encryption | None, by_job) or "AEAD"


def open_spill_store(config: EngineConfig, comm: Comm) -> SpillStore | None:
    """Return the spill store of this rank, still without a file; None when nothing is offloaded to nvme.

    Raises ConfigError as `spill_settings`, and where this installation lacks the native module.
    """
    settings = spill_settings(config, os.environ, world_size=comm.world_size)
    if settings is None:
        return None
    try:
        from zerotrain.runtime.spill import seal
        from zerotrain.runtime.spill.file import SpillPlace
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
    identity = seal.SpillIdentity(job=settings.job, rank=comm.rank, world_size=comm.world_size)
    place = SpillPlace(
        folders=settings.folders,
        limit=None if settings.limit_bytes is None else _limit(settings.limit_bytes),
        queue_depth=settings.queue_depth,
        request_bytes=settings.request_bytes,
    )
    refuse_cores()  # before the key exists
    sealer = create_sealer(seal.Encryption(settings.encryption), identity)
    return SpillStore(place, sealer=sealer, identity=identity)


_limits: dict[int, SpillLimit] = {}
"""Limits of this process by their bytes, as several engines share the rank's part of the volume."""


def _limit(num_bytes: int) -> SpillLimit:
    """Return the limit of one spill store, within the process's limit."""
    from zerotrain.runtime.spill.file import SpillLimit

    return SpillLimit(num_bytes, within=_limits.setdefault(num_bytes, SpillLimit(num_bytes)))
