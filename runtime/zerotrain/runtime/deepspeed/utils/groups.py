"""`deepspeed.utils.groups`: the data-parallel ranks, and the ranks of an `mpu` that an engine was given."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zerotrain.runtime.comm.model_parallel import ModelParallel
from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.zero.running import cores
from zerotrain.runtime.zero.sharded_model import ShardedModel

# DeepSpeed's own names begin like this; scripts and libraries call them nevertheless.
__all__ = [
    "_get_data_parallel_group",
    "_get_data_parallel_rank",
    "_get_data_parallel_world_size",
    "_get_model_parallel_group",
    "_get_model_parallel_rank",
    "_get_model_parallel_world_size",
    "_get_sequence_data_parallel_group",
    "_get_sequence_data_parallel_rank",
    "_get_sequence_data_parallel_world_size",
    "_get_sequence_parallel_group",
    "_get_sequence_parallel_rank",
    "_get_sequence_parallel_world_size",
    "_get_world_group",
]

__getattr__ = attributes_of(__name__)


def _divided() -> tuple[ShardedModel, ModelParallel] | None:
    """Return an open engine that was given an mpu, and its groups; None without one."""
    found = ((core, core.comm.model_parallel) for core in cores())
    return next(((core, parallel) for core, parallel in found if parallel is not None), None)


def _get_world_group() -> Any:
    """Return the group of all ranks; None before there is a process group."""
    return dist.group.WORLD if dist.is_initialized() else None


def _get_data_parallel_group() -> Any:
    """Return the group of ranks among which an engine shards: all, unless an mpu says otherwise."""
    divided = _divided()
    return _get_world_group() if divided is None else divided[0].comm.group


def _get_data_parallel_world_size() -> int:
    """Return the number of data-parallel ranks."""
    divided = _divided()
    if divided is not None:
        return divided[0].comm.world_size
    return dist.get_world_size() if dist.is_initialized() else 1


def _get_data_parallel_rank() -> int:
    """Return this rank's number among the data-parallel ranks."""
    divided = _divided()
    if divided is not None:
        return divided[0].comm.rank
    return dist.get_rank() if dist.is_initialized() else 0


def _get_model_parallel_group() -> Any:
    """Return the mpu's group of the ranks that hold parts of one replica; None without an mpu."""
    divided = _divided()
    return None if divided is None else divided[1].group


def _get_model_parallel_world_size() -> int:
    """Return the number of model-parallel ranks; 1 without an mpu."""
    divided = _divided()
    return 1 if divided is None else divided[1].world_size


def _get_model_parallel_rank() -> int:
    """Return this rank's number among the model-parallel ranks; 0 without an mpu."""
    divided = _divided()
    return 0 if divided is None else divided[1].rank


def _get_sequence_parallel_group() -> Any:
    """Return None: sequences are not divided among ranks."""
    return None


def _get_sequence_parallel_world_size() -> int:
    """Return 1: sequences are not divided among ranks."""
    return 1


def _get_sequence_parallel_rank() -> int:
    """Return 0: sequences are not divided among ranks."""
    return 0


_get_sequence_data_parallel_group = _get_data_parallel_group
_get_sequence_data_parallel_world_size = _get_data_parallel_world_size
_get_sequence_data_parallel_rank = _get_data_parallel_rank
