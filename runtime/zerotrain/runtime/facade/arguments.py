"""The arguments of `initialize`: DeepSpeed's, in its order, and this engine's own; and the refusal of
values of DeepSpeed's arguments that this engine cannot have."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset

from zerotrain.contract.config import ConfigError, EngineConfig
from zerotrain.runtime.optim.groups import ModelParameters

DEFAULT_PORT = 29500
DOCUMENT = "docs/deepspeed.md"
TORCH_LOADER = (
    "leave it out for a shuffled loader of one process, or iterate over a torch.utils.data.DataLoader with a "
    "DistributedSampler(dataset, engine.world_size, engine.rank) and num_workers"
)
OWN_SCHEDULE = "leave it out: the schedule's step takes no arguments; set the groups' values between steps"
OWN_LOSS = "leave it out: the loss belongs to the caller; del loss frees it"

Parameters = ParamSpec("Parameters")
Record = TypeVar("Record")
Result = TypeVar("Result")

ConfigSource = EngineConfig | Mapping[str, Any] | Path | str


@dataclass(frozen=True)
class Arguments:
    """Arguments of one call of `initialize`; the positions up to `config_params` are DeepSpeed's."""

    args: Any = None
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | Callable[..., Any] | None = None
    model_parameters: ModelParameters | None = None
    training_data: Dataset[Any] | None = None
    lr_scheduler: Any = None
    distributed_port: int = DEFAULT_PORT
    mpu: Any = None
    dist_init_required: bool | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    config: ConfigSource | None = None
    mesh_param: Any = None
    config_params: ConfigSource | None = None
    unit_modules: Sequence[str | type[nn.Module]] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            inner = isinstance(getattr(self.model, "module", None), nn.Module)
            hint = "; pass its module, after close() where it is an engine" if inner else ""
            raise TypeError(f"model must be a torch.nn.Module; got {type(self.model).__name__}{hint}")
        if self.mesh_param is not None:
            raise ConfigError(
                "mesh_param",
                "asks for sequence parallelism, which this version does not run",
                self.mesh_param,
                "Leave it out; all ranks are data-parallel.",
            )
        if self.dist_init_required is False and not torch.distributed.is_initialized():
            raise ValueError(
                "dist_init_required=False says that the process group exists, but it does not; call "
                "torch.distributed.init_process_group (or zerotrain.runtime.init_distributed) first, or "
                "leave dist_init_required out"
            )

    def config_source(self) -> ConfigSource:
        """Return the one configuration among `config`, its older name and `args.deepspeed_config`.

        Raises ConfigError when there is none, or two.
        """
        named = self.config if self.config is not None else self.config_params
        from_args = getattr(self.args, "deepspeed_config", None)
        from_args = from_args or getattr(self.args, "deepscale_config", None)
        if named is not None and from_args is not None:
            raise ConfigError(
                "config",
                "must come from one place; initialize() got one and args.deepspeed_config names another",
                str(from_args),
                "Leave one of them out.",
            )
        source: ConfigSource | None = named if named is not None else from_args
        if source is None:
            raise ConfigError(
                "config",
                "must be given: a file, JSON text or a mapping",
                None,
                "Pass config=..., or --deepspeed_config on the command line with args=...",
            )
        return source

    def apply_port(self) -> None:
        """Use `distributed_port` where the environment names no port."""
        if self.distributed_port != DEFAULT_PORT and "MASTER_ADDR" in os.environ:
            os.environ.setdefault("MASTER_PORT", str(self.distributed_port))


def taking(
    record: Callable[Parameters, Record],
) -> Callable[[Callable[[Record], Result]], Callable[Parameters, Result]]:
    """Return a decorator that makes a function of one record take the record's own arguments."""

    def decorate(function: Callable[[Record], Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            return function(record(*args, **kwargs))

        returns = inspect.signature(function).return_annotation
        signature = inspect.signature(record).replace(return_annotation=returns)
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def refuse_unless_default(call: str, argument: str, value: object, default: object, way_out: str) -> None:
    """Raise ValueError where an argument of DeepSpeed has another value than the one that this engine can
    have."""
    if value != default:
        raise ValueError(
            f"{argument} of {call} must be {default!r}; got {value!r}: {way_out}. See {DOCUMENT}"
        )
