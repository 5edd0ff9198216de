"""Units whose forward is compiled.

[Note: hooks outside of graphs] The compiled function takes the place of `forward` in the module's own
dictionary, and not that of the call: `Module.__call__` runs the unit's hooks around it, as without. So a
graph holds nothing of gathers and reductions, and its guards look at parameters only while they are whole,
which then have their own class, sizes and dtype at every stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zerotrain.contract.config.schema import CompileConfig
from zerotrain.runtime.compiling.check import arguments
from zerotrain.runtime.zero.layout import ModelLayout
from zerotrain.runtime.zero.names import innermost, named_modules

VARIANTS = 4
"""Graphs of one module: with gradients and without, for the first sizes and for sizes that change."""


class CompiledUnits:
    """Modules with a compiled forward, until `remove`. Their class, parameters and hooks stay as they are."""

    def __init__(self, modules: Sequence[nn.Module], settings: CompileConfig) -> None:
        """Replace each forward; the modules' first calls compile."""
        self._before: list[tuple[nn.Module, Any]] = []
        """Modules, and what their own dictionaries held as `forward`."""
        _raise_limits(modules)
        for module in modules:
            self._before.append((module, vars(module).get("forward")))
            vars(module)["forward"] = torch.compile(module.forward, **arguments(settings))

    def __len__(self) -> int:
        return len(self._before)

    def remove(self) -> None:
        """Give the modules their own forward back."""
        for module, before in self._before:
            vars(module).pop("forward", None)
            if before is not None:
                vars(module)["forward"] = before
        self._before.clear()


def unit_modules(model: nn.Module, layout: ModelLayout) -> list[nn.Module]:
    """Return the modules of units that contain no other unit, as those would break their graph, without
    torch's own layers, each of which is one kernel anyway."""
    names = {unit.module for unit in layout.units}
    inner = {name for name in names if not any(_is_below(other, name) for other in names)}
    modules = {name: innermost(module) for name, module in named_modules(model) if name in inner}
    return [module for module in modules.values() if not _is_layer_of_torch(module)]


def _is_below(name: str, module: str) -> bool:
    return name != module and (not module or name.startswith(f"{module}."))


def _is_layer_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not module._modules


def _raise_limits(modules: Sequence[nn.Module]) -> None:
    """Let each module of a class have graphs of its own before torch.compile gives up.

    Its limits count the graphs of one function, which all blocks of a model share: blocks that know their
    index would run uncompiled from the ninth on.
    """
    most = max(Counter(_function(module) for module in modules).values(), default=0)
    limits: Any = torch._dynamo.config
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        usual = _USUAL_LIMITS.setdefault(name, getattr(limits, name))
        setattr(limits, name, max(getattr(limits, name), usual + VARIANTS * most))


_USUAL_LIMITS: dict[str, int] = {}
"""Limits of torch.compile before the first engine."""


def _function(module: nn.Module) -> Callable[..., Any]:
    return getattr(module.forward, "__func__", module.forward)
