"""Mend of Accelerate: one call of `prepare` for several models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from torch import nn

from zerotrain.compat.libraries.mends.around import Function, around


def prepare_several_models(module: ModuleType) -> None:
    """Make `prepare` take several models, as under DDP: each becomes an engine with its own optimizers."""

    @around(module.Accelerator, "prepare")
    def prepare(prepare: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        models = [each for each in args if isinstance(each, nn.Module)]
        is_engine = self.distributed_type == module.DistributedType.DEEPSPEED
        if not is_engine or len(models) < 2 or kwargs.get("device_placement") is not None:
            return prepare(self, *args, **kwargs)
        made: dict[int, Any] = {}
        for group in _groups(args, models):
            found = prepare(self, *group)
            made |= zip(map(id, group), found if isinstance(found, tuple) else [found], strict=True)
        return tuple(made[id(each)] for each in args)


def _groups(args: Sequence[Any], models: Sequence[nn.Module]) -> list[list[Any]]:
    """Return what to prepare together: a model with its optimizers and their schedules; the first group has
    also what belongs to no model, such as data loaders."""
    groups: dict[int, list[Any]] = {id(model): [model] for model in models}
    owners = {id(parameter): model for model in models for parameter in model.parameters()}
    homes: dict[int, nn.Module] = {}
    for each in args:
        parameters = list(_parameters_of(each))
        found = {id(owners[key]): owners[key] for key in map(id, parameters) if key in owners}
        if len(found) > 1:
            names = sorted(type(model).__name__ for model in found.values())
            raise ValueError(
                f"{type(each).__name__} trains parameters of {len(found)} models ({', '.join(names)}); each "
                "model has an engine of its own, so make an optimizer for each, or one module of the models"
            )
        for model in found.values():
            homes[id(each)] = model
    for each in args:
        if not isinstance(each, nn.Module):
            home = homes.get(id(each)) or homes.get(id(getattr(each, "optimizer", None))) or models[0]
            groups[id(home)].append(each)
    return list(groups.values())


def _parameters_of(optimizer: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters of an optimizer, or of Accelerate's stand-in for one; nothing for other values."""
    given: Any = getattr(optimizer, "param_groups", None) or getattr(optimizer, "params", ())
    for each in [given] if isinstance(given, nn.Parameter) else given:
        yield from each["params"] if isinstance(each, dict) else [each]
