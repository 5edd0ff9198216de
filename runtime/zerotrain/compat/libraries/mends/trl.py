"""Mends of TRL: generation during training, losses that read the weight of the output layer, and log
probabilities of the reference that are computed before training."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import nn

from zerotrain.compat.libraries.mends.around import Function, around
from zerotrain.compat.libraries.mends.lending import give_back, is_driven, is_lent, lend
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
    is not. A call of the model is one of the engine. A model that is to be trained later, or is trained
    already, is only lent: see `give_back_policy`.
    """

    @around(module, "prepare_deepspeed")
    def prepare_deepspeed(prepare: Function, model: nn.Module, accelerator: Any) -> nn.Module:
        if is_driven(model):
            return model
        if any(parameter.requires_grad for parameter in model.parameters()):
            return lend(model, lambda: prepare(model, accelerator))
        found: nn.Module = prepare(model, accelerator).module
        return found


def give_back_policy(module: ModuleType) -> None:
    """Make the model of DPO or KTO free for training once it has computed the log probabilities of the
    reference."""
    trainer = next(vars(module)[name] for name in ("DPOTrainer", "KTOTrainer") if name in vars(module))

    @around(trainer, "_precompute_ref_logps")
    def precompute(compute: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return compute(self, *args, **kwargs)
        finally:
            self._precompute_engine = None
            if is_lent(self.model):
                give_back(self.model)


def hash_one_by_one(module: ModuleType) -> None:
    """Make `hash_module` read parameters that are not read yet one at a time, instead of keeping them."""
    module.hash_module = _hash  # type: ignore[attr-defined]


def _hash(module: nn.Module) -> str:
    """Return the digest that TRL's function gives for the same values."""
    digest = hashlib.sha256()
    for _, tensor in sorted(module.state_dict().items()):
        values = tensor.clone().cpu()
        digest.update(str(values.dtype).encode())
        if values.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            values = values.float()
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def gather_heads(module: ModuleType) -> None:
    """Make `maybe_gather_lm_head_ctx` gather the parameters that are partitioned now.

    It reads `ds_status` of every parameter, which one that is whole does not have.
    """
    module.maybe_gather_lm_head_ctx = _gather_partitioned  # type: ignore[attr-defined]


def _gather_partitioned(*params: nn.Parameter | None) -> AbstractContextManager[None]:
    """Return a context in which the parameters are whole."""
    hidden = {id(param): param for param in params if param is not None and is_zero_param(param)}
    return GatheredParameters(list(hidden.values())) if hidden else nullcontext()
