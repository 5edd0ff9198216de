"""Mends of TRL: generation during training, and losses that read the weight of the output layer."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from torch import nn

from zerotrain.runtime.deepspeed.runtime.zero.partition_parameters import is_zero_param
from zerotrain.runtime.deepspeed.zero import GatheredParameters


def keep_hooks(module: ModuleType) -> None:
    """Make `remove_hooks` and `add_hooks` do nothing.

    They reach into DeepSpeed's optimizer before and after generation. The engine's hooks gather nothing while
    the parameters are whole, so they may stay.
    """
    module.remove_hooks = module.add_hooks = _do_nothing  # type: ignore[attr-defined]


def _do_nothing(model: object) -> None:
    """Leave the hooks of the model as they are."""


def give_models_for_evaluation(module: ModuleType) -> None:
    """Make `prepare_deepspeed` return the model that the engine drives, not the engine.

    TRL tells models from functions that return rewards by `isinstance(reward, nn.Module)`, which the engine
    is not. A call of the model is one of the engine.
    """
    prepare = module.prepare_deepspeed

    @functools.wraps(prepare)
    def prepare_deepspeed(model: nn.Module, accelerator: Any) -> nn.Module:
        found: nn.Module = prepare(model, accelerator).module
        return found

    module.prepare_deepspeed = prepare_deepspeed  # type: ignore[attr-defined]


def gather_heads(module: ModuleType) -> None:
    """Make `maybe_gather_lm_head_ctx` gather the parameters that are partitioned now.

    It reads `ds_status` of every parameter, which one that is whole does not have.
    """
    module.maybe_gather_lm_head_ctx = _gather_partitioned  # type: ignore[attr-defined]


def _gather_partitioned(*params: nn.Parameter | None) -> AbstractContextManager[None]:
    """Return a context in which the parameters are whole."""
    hidden = {id(param): param for param in params if param is not None and is_zero_param(param)}
    return GatheredParameters(list(hidden.values())) if hidden else nullcontext()
