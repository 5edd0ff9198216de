"""Mends of Lightning's Fabric; those that it shares with the Trainer are in `lightning`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from zerotrain.compat.libraries.mends.around import Function, around
from zerotrain.runtime.comm.worlds import check_seen
from zerotrain.runtime.construct.pending import is_pending
from zerotrain.runtime.engine import Engine


def leave_unread_models(module: ModuleType) -> None:
    """Make `setup` leave a model where it is whose values are not read yet: the engine reads them, each rank
    its share."""

    @around(module.DeepSpeedStrategy, "module_to_device")
    def module_to_device(move: Function, self: Any, model: torch.nn.Module) -> None:
        if not any(parameter.is_meta or is_pending(parameter) for parameter in model.parameters()):
            move(self, model)


def step_the_engine(module: ModuleType) -> None:
    """Make `optimizer.step()` one of the engine: it looks for attributes of an optimizer that the engine does
    not have."""

    @around(module.DeepSpeedStrategy, "optimizer_step")
    def optimizer_step(step: Function, self: Any, optimizer: Any, **kwargs: Any) -> Any:
        return step(self, self.model, **kwargs)


def find_engines(module: ModuleType) -> None:
    """Make `save` and `load` find the engine in the state that they are given: they look for modules."""

    @around(module, "_get_deepspeed_engines_from_state")
    def engines(find: Function, state: dict[str, Any]) -> list[Any]:
        return [*find(state), *(value for value in state.values() if isinstance(value, Engine))]


def check_number_of_ranks(module: ModuleType) -> None:
    """Make `setup` of Fabric compare its ranks with the launcher's."""

    @around(module.Fabric, "_validate_setup")
    def validate_setup(validate: Function, self: Any, *args: Any, **kwargs: Any) -> None:
        validate(self, *args, **kwargs)
        check_seen("Lightning", self.world_size)
