"""Mends of Lightning's Fabric; those that it shares with the Trainer are in `lightning`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from zerotrain.runtime.comm.worlds import check_seen
from zerotrain.runtime.construct.pending import is_pending
from zerotrain.runtime.engine import Engine


def leave_unread_models(module: ModuleType) -> None:
    """Make `setup` leave a model where it is whose values are not read yet: the engine reads them, each rank
    its share."""
    strategy: Any = module.DeepSpeedStrategy
    move = strategy.module_to_device

    @functools.wraps(move)
    def module_to_device(self: Any, model: torch.nn.Module) -> None:
        if not any(parameter.is_meta or is_pending(parameter) for parameter in model.parameters()):
            move(self, model)

    strategy.module_to_device = module_to_device


def step_the_engine(module: ModuleType) -> None:
    """Make `optimizer.step()` one of the engine: it looks for attributes of an optimizer that the engine does
    not have."""
    strategy: Any = module.DeepSpeedStrategy
    step = strategy.optimizer_step

    @functools.wraps(step)
    def optimizer_step(self: Any, optimizer: Any, **kwargs: Any) -> Any:
        return step(self, self.model, **kwargs)

    strategy.optimizer_step = optimizer_step


def find_engines(module: ModuleType) -> None:
    """Make `save` and `load` find the engine in the state that they are given: they look for modules."""
    find: Callable[[dict[str, Any]], list[Any]] = module._get_deepspeed_engines_from_state

    @functools.wraps(find)
    def engines(state: dict[str, Any]) -> list[Any]:
        return [*find(state), *(value for value in state.values() if isinstance(value, Engine))]

    module._get_deepspeed_engines_from_state = engines  # type: ignore[attr-defined]


def check_number_of_ranks(module: ModuleType) -> None:
    """Make `setup` of Fabric compare its ranks with the launcher's."""
    fabric: Any = module.Fabric
    validate = fabric._validate_setup

    @functools.wraps(validate)
    def validate_setup(self: Any, *args: Any, **kwargs: Any) -> None:
        validate(self, *args, **kwargs)
        check_seen("Lightning", self.world_size)

    fabric._validate_setup = validate_setup
