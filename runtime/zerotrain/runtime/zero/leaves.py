"""Modules that a script marks as leaves: units that are gathered as a whole, whatever they contain.

The configuration's `zero_optimization.leaf_module` does the same by names and classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from weakref import WeakSet

from torch import nn

from zerotrain.contract.config import LeafModuleConfig
from zerotrain.runtime.zero import names as plain
from zerotrain.runtime.zero.placeholder import owner_of
from zerotrain.runtime.zero.sharded_model import ShardedModel

_marked: WeakSet[nn.Module] = WeakSet()


def mark_leaf(module: nn.Module, *, is_leaf: bool = True) -> None:
    """Mark a module, or remove the mark. Raises RuntimeError once an engine drives it."""
    owners = [owner_of(parameter) for parameter in module.parameters()]
    if any(isinstance(owner, ShardedModel) and not owner.is_closed for owner in owners):
        raise RuntimeError(
            f"an engine drives this {type(module).__name__} already, and its units are fixed; mark leaf "
            "modules before initialize, or name them in zero_optimization.leaf_module"
        )
    if is_leaf:
        _marked.add(module)
    else:
        _marked.discard(module)


def is_leaf(module: nn.Module) -> bool:
    """Return whether the module itself is marked."""
    return module in _marked


def marked_in(model: nn.Module) -> list[nn.Module]:
    """Return all marked modules of a model."""
    return [module for module in model.modules() if module in _marked]


def of_classes(model: nn.Module, classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """Return the modules of these classes, which are given as classes or by name, bare or with their
    module."""
    wanted = list(classes)
    kinds = tuple(kind for kind in wanted if isinstance(kind, type))
    names = {name for name in wanted if isinstance(name, str)}
    return [
        module
        for module in model.modules()
        if isinstance(module, kinds)
        or not names.isdisjoint(
            {type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}"}
        )
    ]


def with_marked(model: nn.Module, leaves: LeafModuleConfig) -> LeafModuleConfig:
    """Return the configuration's leaves with the marked modules added."""
    names = [name for name, module in plain.all_modules(model) if module in _marked]
    return replace(leaves, names=(*leaves.names, *names)) if names else leaves
