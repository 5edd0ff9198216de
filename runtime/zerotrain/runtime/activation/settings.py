"""Settings of activation checkpointing, from `configure_checkpointing` and the configuration's block.

They are global to the process, because models call `checkpoint_activations` without an engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerotrain.contract.config import ActivationCheckpointingConfig, load, resolve
from zerotrain.runtime.activation.arena import ActivationArena
from zerotrain.runtime.comm.model_parallel import ModelParallel


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings that say where the inputs of checkpointed parts are kept."""

    partition: bool = False
    """Whether each rank of the model-parallel group keeps only its part."""
    contiguous: bool = False
    """Whether inputs are kept in preallocated buffers, by size."""
    num_checkpoints: int | None = None
    """Number of inputs per buffer; None = buffers grow."""
    in_host_memory: bool = False
    synchronize: bool = False
    """Whether to wait for the device before and after each part."""
    profile: bool = False
    """Whether to print the times of each part."""
    parallel: ModelParallel | None = None

    @classmethod
    def of(cls, config: ActivationCheckpointingConfig, parallel: ModelParallel | None) -> Settings:
        """Convert the resolved configuration block."""
        return cls(
            partition=config.partition_activations,
            contiguous=config.contiguous_memory_optimization,
            num_checkpoints=config.number_checkpoints,
            in_host_memory=config.cpu_checkpointing,
            synchronize=config.synchronize_checkpoint_boundary,
            profile=config.profile,
            parallel=parallel,
        )

    @property
    def moves_inputs(self) -> bool:
        """Whether inputs are moved or copied instead of kept where they are."""
        return self.contiguous or self.in_host_memory or self.is_partitioned

    @property
    def is_partitioned(self) -> bool:
        return self.partition and self.parallel is not None


class _Process:
    settings = Settings()
    arena = ActivationArena()
    is_configured = False


def current() -> tuple[Settings, ActivationArena]:
    """Return the current settings and their arena."""
    return _Process.settings, _Process.arena


def adopt(settings: Settings) -> None:
    """Use these settings from now on; warn if partitioning has no group to partition over."""
    if settings.partition and settings.parallel is None:
        warnings.warn(
            "activation_checkpointing.partition_activations: there is no model-parallel group of more than "
            "one rank (initialize or configure_checkpointing with mpu=...), so every rank keeps its "
            "checkpoints whole",
            stacklevel=3,
        )
    _Process.settings, _Process.arena = settings, ActivationArena(settings.num_checkpoints)
    _Process.is_configured = True


def configure_checkpointing(
    mpu_: object | None = None,
    deepspeed_config: Mapping[str, Any] | Path | str | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Configure how `checkpoint_activations` keeps the inputs of what it recomputes, for the whole process.

    Args:
        mpu_: an object with get_model_parallel_group(), _rank() and _world_size() (or Megatron's
            get_tensor_model_parallel_*), whose ranks call it with equal inputs.
        deepspeed_config: a configuration (file, text or mapping) whose `activation_checkpointing` block is
            the base; None = everything off. `initialize` reads its own configuration's block already.
        partition_activations: each rank of the group keeps its part of every input; backward gathers it.
        contiguous_checkpointing: keep inputs in one preallocated buffer per size, against fragmentation.
        num_checkpoints: inputs that such a buffer holds; another one is added when it is full.
        checkpoint_in_cpu: keep inputs in host memory (pinned, copied without waiting).
        synchronize: wait for the device before and after each part.
        profile: print the forward and the recomputation time of each part on rank 0.

    Raises ConfigError for a wrong configuration, TypeError for an mpu without these methods. Follows ZeRO,
    https://arxiv.org/abs/1910.02054, section 6.1.
    """
    base = Settings()
    if deepspeed_config is not None:
        base = Settings.of(resolve(load(deepspeed_config), world_size=1).activation_checkpointing, None)
    given = {
        "partition": partition_activations,
        "contiguous": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "in_host_memory": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    adopt(replace(base, parallel=ModelParallel.of(mpu_), **changes))


def reset_checkpointing() -> None:
    """Drop the buffers of contiguous checkpointing; those in use stay valid. The settings stay."""
    _Process.arena = ActivationArena(_Process.settings.num_checkpoints)


def checkpointing_is_configured() -> bool:
    """Return whether `configure_checkpointing` was called, or an engine with the block was made."""
    return _Process.is_configured
