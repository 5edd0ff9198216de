"""Modules that a script marks as leaves: units that are gathered as a whole, whatever is in them.

The configuration's `zero_optimization.leaf_module` says the same by names and classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from weakref import WeakSet

from torch import nn

from zerotrain.contract.config import LeafModuleConfig
from zerotrain.runtime.zero import names as plain
from zerotrain.runtime.zero.core import Core
from zerotrain.runtime.zero.placeholder import owner_of

_marked: WeakSet[nn.Module] = WeakSet()


def mark_leaf(module: nn.Module, *, is_leaf: bool = True) -> None:
    """Mark a module, or take the mark away. Raises RuntimeError once an engine drives it."""
    owners = [owner_of(parameter) for parameter in module.parameters()]
    if any(isinstance(owner, Core) and not owner.is_closed for owner in owners):
        raise RuntimeError(
            f"an engine drives this {type(module).__name__} already, and its units are cut; mark leaf "
            "modules before initialize, or name them in zero_optimization.leaf_module"
        )
    if is_leaf:
        _marked.add(module)
    else:
        _marked.discard(module)


def is_leaf(module: nn.Module) -> bool:
    """Whether the module itself is marked."""
    return module in _marked


def marked_in(model: nn.Module) -> list[nn.Module]:
    """All marked modules of a model."""
    return [module for module in model.modules() if module in _marked]


def of_classes(model: nn.Module, classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """The modules of these classes, given as such or by their names, bare or with their module."""
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
    """The configuration's leaves and the marked ones."""
    names = [name for name, module in plain.all_modules(model) if module in _marked]
    return replace(leaves, names=(*leaves.names, *names)) if names else leaves
