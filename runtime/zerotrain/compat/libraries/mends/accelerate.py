"""Mends of Accelerate: ranks on processors, and optimizers, that train through the engine."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch

from zerotrain.compat.libraries.mends.around import Function, around
from zerotrain.runtime.comm.worlds import check_seen
from zerotrain.runtime.engine import Engine


def join_ranks_on_processors(module: ModuleType) -> None:
    """Make `PartialState` use gloo for ranks without an accelerator.

    Accelerate returns no backend for them, and then takes every rank for a world of its own.
    """

    @around(module.PartialState, "_prepare_backend")
    def prepare_backend(
        prepare: Function, self: Any, cpu: bool = False, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        backend, kind = prepare(self, cpu, *args, **kwargs)
        if backend is None and kind == module.DistributedType.NO and is_rank():
            return "gloo", module.DistributedType.MULTI_CPU
        return backend, kind


def check_number_of_ranks(module: ModuleType) -> None:
    """Make `PartialState` compare its ranks with the launcher's when it is made."""

    @around(module.PartialState, "__init__")
    def init(make: Function, self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        check_seen("Accelerate", self.num_processes)


def is_rank() -> bool:
    """Return whether a launcher started this process as a rank."""
    return int(os.environ.get("LOCAL_RANK", "-1")) >= 0


def give_shapes_on_other_ranks(module: ModuleType) -> None:
    """Make `get_state_dict` return names and shapes, as meta tensors, on ranks other than the first.

    It returns None there at stage 3. `save_pretrained(is_main_process=False, state_dict=None)` would read the
    model's own parameters, which are on other ranks, although it writes nothing.
    """

    @around(module.Accelerator, "get_state_dict")
    def get_state_dict(get: Function, self: Any, model: Any, unwrap: bool = True) -> Any:
        found = get(self, model, unwrap)
        if found is not None or not isinstance(model, Engine):
            return found
        return {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta")
            for name, value in model.module.state_dict().items()
            if isinstance(value, torch.Tensor)
        }


def keep_offloaded_optimizers(module: ModuleType) -> None:
    """Make `prepare` pass the script's optimizer on to the engine where its states are offloaded.

    Accelerate replaces it by one of DeepSpeed's for processors, which is Adam for all that it does not know:
    SGD, say. The engine runs the rule of the optimizer it is given, wherever its states are. Those of
    bitsandbytes are replaced still.
    """

    @around(module, "map_pytorch_optim_to_deepspeed")
    def map_pytorch_optim_to_deepspeed(replace: Function, optimizer: torch.optim.Optimizer) -> Any:
        is_of_others = type(optimizer).__module__.startswith("bitsandbytes.")
        return replace(optimizer) if is_of_others else optimizer


def keep_prepared_optimizers(module: ModuleType) -> None:
    """Make `prepare` leave an optimizer that it prepared before as it is: a Trainer prepares its own again at
    each training."""

    @around(module.Accelerator, "_prepare_deepspeed")
    def prepare_deepspeed(prepare: Function, self: Any, *args: Any) -> Any:
        is_prepared = bool(args) and all(isinstance(each, module.AcceleratedOptimizer) for each in args)
        return args if is_prepared else prepare(self, *args)
