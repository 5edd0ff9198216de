"""The model-parallel group of a DeepSpeed-style `mpu` object, as programs like Megatron supply it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParallel:
    """Rank and size of the group whose ranks hold the parts of one replica of the model."""

    group: Any
    """A torch.distributed process group."""
    rank: int
    world_size: int

    @classmethod
    def of(cls, mpu: object | None) -> ModelParallel | None:
        """Read an mpu; return None for None and for a group of one rank. Raises TypeError naming a missing
        method.

        Megatron calls the group tensor model parallel since it has pipelines; both names are read.
        """
        if mpu is None:
            return None
        prefix = "tensor_model" if hasattr(mpu, "get_tensor_model_parallel_group") else "model"
        group, rank, world_size = (
            call_of(mpu, f"get_{prefix}_parallel_{what}") for what in ("group", "rank", "world_size")
        )
        if int(world_size) == 1:
            return None
        return cls(group=group, rank=int(rank), world_size=int(world_size))

    @classmethod
    def data_parallel_group(cls, mpu: object | None) -> Any:
        """Return the process group of the ranks that hold the same part as this one; None = all ranks.

        Raises TypeError naming a missing method of the mpu, ValueError for one with pipeline stages.
        """
        if cls.of(mpu) is None:
            return None
        assert mpu is not None  # of() says so
        for name in ("get_pipe_parallel_world_size", "get_pipeline_model_parallel_world_size"):
            if hasattr(mpu, name) and int(call_of(mpu, name)) > 1:
                raise ValueError(
                    f"mpu.{name}() must be 1, as pipeline parallelism is not run; got {call_of(mpu, name)}"
                )
        return call_of(mpu, "get_data_parallel_group")

    def combine(self, rows: Sequence[float], device: torch.device) -> list[list[float]]:
        """Gather a short record of float64 from every rank of the group, in rank order."""
        mine = torch.tensor(rows, dtype=torch.float64, device=device)
        full: list[list[float]] = self.all_gather(mine).view(self.world_size, -1).tolist()
        return full

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """Gather equal 1-D parts from all ranks of the group and concatenate them in rank order."""
        full = part.new_empty(self.world_size * part.numel())
        dist.all_gather(list(full.chunk(self.world_size)), part, group=self.group)
        return full


def call_of(mpu: object, name: str) -> Any:
    """Return the result of an mpu's method. Raises TypeError if it has no such method."""
    method = getattr(mpu, name, None)
    if not callable(method):
        raise TypeError(f"mpu must have a method {name}(), as Megatron's has; got {type(mpu).__name__}")
    return method()


def is_divided(parameter: torch.Tensor) -> bool:
    """Return whether the ranks of the group hold different parts of the parameter, by Megatron's marks on it.
    All other parameters are replicas, whose gradient counts once."""
    return any(getattr(parameter, mark, False) for mark in ("model_parallel", "tensor_model_parallel"))
