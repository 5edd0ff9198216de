"""Mends of transformers and PEFT: a model under stage 3 that a script saves by the model's own method."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torch import nn

from zerotrain.compat.libraries.mends.around import Function, around
from zerotrain.compat.libraries.mends.lending import driver_of
from zerotrain.runtime.deepspeed.runtime.zero.partition_parameters import is_zero_param
from zerotrain.runtime.weights.adapters import adapter_parameters
from zerotrain.runtime.weights.whole import frozen_parameters, whole_state
from zerotrain.runtime.zero.sharded_model import ShardedModel


def gather_models(module: ModuleType) -> None:
    """Make `save_pretrained` gather weights that are on other ranks, where no state dict has them.

    A script that says which rank is the main one calls it on every rank, as all examples of transformers do.
    """

    @around(module.PreTrainedModel, "save_pretrained")
    def save_pretrained(
        save: Function,
        self: nn.Module,
        save_directory: Any,
        is_main_process: bool | None = None,
        state_dict: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if state_dict is None and (core := _holder(self, self.parameters(), is_main_process)):
            state_dict = whole_state(core, part=self, keeps_values=bool(is_main_process))
        return save(self, save_directory, is_main_process is not False, state_dict, *args, **kwargs)


def gather_adapters(module: ModuleType) -> None:
    """Make `save_pretrained` of a PEFT model do the same, for its adapters alone."""

    @around(module.PeftModel, "save_pretrained")
    def save_pretrained(save: Function, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = adapter_parameters(self)
        parameters = [each for each in self.parameters() if id(each) in own]
        if kwargs.get("state_dict") is None and (
            core := _holder(self, parameters, kwargs.get("is_main_process"))
        ):
            frozen, writes = frozen_parameters(self, but=own), bool(kwargs["is_main_process"])
            kwargs["state_dict"] = whole_state(core, part=self, without=frozen, keeps_values=writes)
        return save(self, *args, **kwargs)


def _holder(
    model: nn.Module, parameters: Iterable[nn.Parameter], is_main_process: bool | None
) -> ShardedModel | None:
    """Return what has the parameters once every rank saves; None where they are whole here. Collective.

    Raises RuntimeError where the script does not say which rank is the main one: this rank may be alone.
    """
    core = driver_of(model) if any(map(is_zero_param, parameters)) else None
    if core is None:
        return None
    if is_main_process is None:
        raise RuntimeError(
            f"save_pretrained of {type(model).__name__} needs weights that are on other ranks (stage 3): "
            "call it on every rank, with is_main_process=accelerator.is_main_process (rank 0 writes), or "
            "give it state_dict=accelerator.get_state_dict(engine); save_model of a Trainer does so itself"
        )
    core.check_idle("save_pretrained()")
    core.meet_and_settle("save_pretrained")
    return core
