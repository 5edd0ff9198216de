"""The optimizer and the schedule that a script passes to `initialize`, or else those of the configuration.

A torch optimizer that the engine implements itself (Adam, AdamW, SGD, Adagrad) is replaced by the engine's,
with the same groups and options; another one runs on the shards as it is (`foreign.py`). In both cases the
script's object shares the engine's parameter groups afterwards, so a rate that is set through it takes
effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from zerotrain.contract.config import ConfigError, EngineConfig, OptimizerConfig
from zerotrain.runtime.optim.foreign import ForeignRule, refuse_whole_tensor
from zerotrain.runtime.optim.groups import GroupError, ModelParameters, listed
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.optim.schedule import LrSchedule, Schedule, TorchSchedule
from zerotrain.runtime.optim.torch_face import hand_over, share_step_hooks
from zerotrain.runtime.zero.layout import ModelLayout

_OWN = {
    torch.optim.AdamW: ("AdamW", ("amsgrad",)),
    torch.optim.Adam: ("Adam", ("amsgrad",)),
    torch.optim.SGD: ("SGD", ("dampening", "nesterov")),
    torch.optim.Adagrad: ("Adagrad", ("lr_decay", "initial_accumulator_value")),
}
"""Optimizers of torch that the engine implements: its name, and the options that all groups must share."""


class NamedOptimizer(torch.optim.Optimizer):
    """Base of optimizers that only name one of the engine's updates, for scripts that make their optimizer
    themselves: torch has no LAMB and no Lion. It holds the groups and options."""

    update_name: ClassVar[str]
    """Name of the update in the configuration's `optimizer.type`."""
    shared_options: ClassVar[tuple[str, ...]] = ()
    """Options that must be equal in all groups."""

    def step(self, closure: Callable[[], Any] | None = None) -> NoReturn:
        """Raise RuntimeError: the engine does the update."""
        raise RuntimeError(
            f"{type(self).__name__} has no update of its own: pass it to initialize(optimizer=...), and call "
            "engine.step()"
        )


def make_optimizer(
    model: nn.Module,
    layout: ModelLayout,
    config: EngineConfig,
    *,
    optimizer: Any = None,
    model_parameters: ModelParameters | None = None,
) -> ZeroOptimizer:
    """Return the engine's optimizer.

    `optimizer`: None, a torch optimizer over the model's parameters, or a function of parameters (or groups)
    that makes one. Raises ConfigError for an optimizer that cannot run on shards or that needs
    `zero_allow_untested_optimizer`, GroupError for groups that do not cover the model.
    """
    if optimizer is None:
        configured = config.optimizer or OptimizerConfig(type="AdamW")
        maker = getattr(torch.optim, configured.type, None) if configured.is_untested else None
        if maker is None:
            made = ZeroOptimizer(model, layout, configured, model_parameters=model_parameters)
            made.is_default = config.optimizer is None
            return made
        optimizer = _configured_maker(maker, configured)
    given = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    if given is None:
        given = _made(optimizer, model, model_parameters)
    made = _adopt(given, model, layout, config)
    hand_over(given, made)
    if not isinstance(made.rule, ForeignRule):  # else a copy of it steps, and calls them
        share_step_hooks(made, given)
    return made


def make_schedule(optimizer: ZeroOptimizer, config: EngineConfig, lr_scheduler: Any = None) -> Schedule:
    """Return the engine's schedule. `lr_scheduler`: None, a torch schedule, or a function of an optimizer
    that makes one. Raises ConfigError for a schedule that needs more than its number of steps."""
    if lr_scheduler is None:
        return LrSchedule(optimizer.param_groups, config.scheduler)
    if isinstance(lr_scheduler, type) or not hasattr(lr_scheduler, "step"):
        lr_scheduler = lr_scheduler(optimizer)
    return TorchSchedule(lr_scheduler, optimizer)


def _configured_maker(maker: Any, config: OptimizerConfig) -> Callable[[Any], Any]:
    """Return a function that makes a torch optimizer by its configured name and parameters."""

    def make(parameters: Any) -> Any:
        try:
            return maker(parameters, **config.params)
        except TypeError as error:
            raise ConfigError(
                "optimizer.params", f"must fit torch.optim.{config.type} ({error})", dict(config.params),
                "Write the parameters of that class.",
            ) from error  # fmt: skip

    return make


def _made(maker: Any, model: nn.Module, parameters: ModelParameters | None) -> torch.optim.Optimizer:
    made = maker(
        listed(parameters) or [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            "optimizer",
            "must be a torch optimizer, or a function of parameters that makes one",
            type(made).__name__,
            "Pass for example torch.optim.AdamW.",
        )
    return made


def _adopt(
    given: torch.optim.Optimizer, model: nn.Module, layout: ModelLayout, config: EngineConfig
) -> ZeroOptimizer:
    refuse_whole_tensor(given)
    if isinstance(given, NamedOptimizer):
        return _replace(
            given, given.update_name, given.shared_options, model=model, layout=layout, config=config
        )
    known = _OWN.get(type(given))
    if known is not None and not _has_rare_options(given):
        return _replace(given, *known, model=model, layout=layout, config=config)
    name = type(given).__name__
    if not config.zero_allow_untested_optimizer:
        raise ConfigError(
            "zero_allow_untested_optimizer",
            f"must be true for {name}, whose updates are not the engine's own",
            False,
            "Set it to true, or use AdamW.",
        )
    if any(given.state.values()):
        raise ConfigError(
            "optimizer",
            "must not have states yet, as the engine shards them",
            name,
            "Pass it before its first step, and load its states from a checkpoint of the engine.",
        )
    return ZeroOptimizer(model, layout, OptimizerConfig(type=name), prototype=given)


def _has_rare_options(given: torch.optim.Optimizer) -> bool:
    return any(group.get("maximize") or group.get("differentiable") for group in given.param_groups)


def _replace(
    given: torch.optim.Optimizer,
    name: str,
    shared: tuple[str, ...],
    *,
    model: nn.Module,
    layout: ModelLayout,
    config: EngineConfig,
) -> ZeroOptimizer:
    """Return the engine's own optimizer of that kind with the given one's groups."""
    first = given.param_groups[0]
    for index, group in enumerate(given.param_groups):
        for key in (*shared, "decoupled_weight_decay"):
            if group.get(key) != first.get(key):
                raise GroupError(
                    f"parameter group {index} sets {key} to {group.get(key)!r} and group 0 to "
                    f"{first.get(key)!r}; it must be the same in all groups"
                )
        group["lr"] = float(group["lr"])
    if name != "Adagrad" and any(given.state.values()):
        raise ConfigError(
            "optimizer",
            "must not have taken steps yet, as its states are replaced by sharded ones",
            name,
            "Pass it before its first step, and load its states from a checkpoint of the engine.",
        )
    given.state.clear()
    torch_adam = config.optimizer.params.get("torch_adam") if config.optimizer else None
    own = OptimizerConfig(
        type=name,
        decoupled_weight_decay=name == "AdamW" or bool(first.get("decoupled_weight_decay")),
        bias_correction=bool(first.get("bias_correction", True)),
        momentum=max(float(group.get("momentum") or 0.0) for group in given.param_groups),
        params={**{key: first.get(key) for key in shared}, "torch_adam": torch_adam},
    )
    return ZeroOptimizer(model, layout, own, model_parameters=given.param_groups, is_torchs=True)
