"""Divides a model into units: decides which parameters are gathered together.

The default rule: every child of an outermost `ModuleList` (a transformer block) is a unit. Outside of those,
every module that itself holds at least `min_unit_numel` parameter elements is one (embedding, head). The rest
belongs to the root. `unit_modules` replaces the rule. Where calls cost more than bytes, a small module that
holds several units, none of them a block, is one unit instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zerotrain.contract.config import LeafModuleConfig
from zerotrain.runtime.zero import names as plain
from zerotrain.runtime.zero.dtypes import StoredDtypes
from zerotrain.runtime.zero.layout import (
    ALIGN,
    LayoutError,
    ModelLayout,
    ParameterFact,
    UnitLayout,
    build_unit,
)

ROOT_UNIT = "(root)"
FROZEN_SUFFIX = "#frozen"
SHARED_SUFFIX = "#shared"
SMALL_UNIT = "(small)"
"""Name of the unit of all small parameters of the model; see `SmallParameters`."""

MIN_UNIT_NUMEL = 1024
"""Number of elements below which a unit of its own costs more in calls than it saves in bytes."""

JOINED_NUMEL = 12 << 20
"""Largest number of elements of a module whose units are joined into one, on a GPU: 24 MiB in 16 bits, about
DDP's bucket. Collectives of less take longer to start than to send."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallParameters:
    """Limits of the parameters that every rank keeps whole at stage 3, where gathers would cost more than
    they save."""

    numel: int = 0
    """Number of elements of the largest such parameter."""
    budget: int = 1 << 62
    """Maximum number of elements of all of them, taken in the model's order."""


def plan_layout(
    model: nn.Module,
    *,
    world_size: int,
    compute_dtype: str,
    unit_modules: Sequence[str | type[nn.Module]] | None = None,
    min_unit_numel: int = MIN_UNIT_NUMEL,
    joined_numel: int = 0,
    leaves: LeafModuleConfig | None = None,
    small: SmallParameters | None = None,
) -> ModelLayout:
    """Lay the model out for `world_size` ranks; trainable floating parameters take `compute_dtype`, frozen
    ones as `StoredDtypes` says.

    `unit_modules` lists module names (fqn), class names or classes. A parameter belongs to the innermost unit
    module above it. One that several units share (tied weights) belongs to the innermost module above all its
    users. Modules of at most `joined_numel` elements are joined into one unit. `leaves` are units that
    contain no other unit, in addition to those of the rule or the list.
    `small` parameters share one unit of the model. Raises LayoutError if an entry matches no module.
    """
    boundaries = (
        set(_default_boundaries(model, min_unit_numel, joined_numel))
        if unit_modules is None
        else set(_chosen_boundaries(model, unit_modules))
    )
    boundaries = _with_leaves(model, boundaries, leaves or LeafModuleConfig())
    small = small or SmallParameters()
    budget = small.budget
    aliases: dict[str, str] = {}
    stored = StoredDtypes(model.parameters(), compute_dtype)
    members: dict[tuple[str, str, bool, str], list[ParameterFact]] = {}
    for names, parameter in _parameters_with_names(model):
        aliases.update(dict.fromkeys(names[1:], names[0]))
        module = _home(names, boundaries)
        # Weights shared between units get a flat buffer of their own, because they live longer than their
        # module.
        unit = _unit_name(module if _is_own(names, module, boundaries) else names[0].rpartition(".")[0])
        if parameter.numel() <= min(small.numel, budget) and small.numel:
            module, unit = "", SMALL_UNIT
            budget -= parameter.numel()
        dtype = stored.of(parameter)
        fact = ParameterFact(fqn=names[0], shape=tuple(parameter.shape), dtype=dtype)
        members.setdefault((module, unit, parameter.requires_grad, dtype), []).append(fact)
    units = [_build(key, facts, world_size=world_size, taken=members) for key, facts in members.items()]
    order = {name: index for index, (name, _) in enumerate(plain.walk(model))}
    units.sort(key=lambda unit: (order[unit.module], not unit.trainable))
    return ModelLayout(units=tuple(units), world_size=world_size, align=ALIGN, aliases=aliases)


def _build(
    key: tuple[str, str, bool, str],
    facts: list[ParameterFact],
    *,
    world_size: int,
    taken: dict[tuple[str, str, bool, str], list[ParameterFact]],
) -> UnitLayout:
    module, unit, trainable, dtype = key
    name = unit if trainable else unit + FROZEN_SUFFIX
    is_small = unit == SMALL_UNIT
    if (
        not is_small
        and module != _module_of(unit)
        and any(other[1] == unit and other[0] != module for other in taken)
    ):
        name += SHARED_SUFFIX  # a module with tied parameters and with parameters of its own
    if sum(other[:3] == key[:3] for other in taken) > 1:  # frozen weights of several dtypes
        name = f"{name}.{dtype}"
    return build_unit(
        name=name,
        module=module,
        trainable=trainable,
        parameters=facts,
        world_size=world_size,
        align=ALIGN,
        stays_whole=is_small,
    )


def _parameters_with_names(model: nn.Module) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Yield every distinct parameter with all its fqns; the first one owns it."""
    names: dict[nn.Parameter, list[str]] = {}
    for fqn, parameter in plain.named_parameters(model, remove_duplicate=False):
        names.setdefault(parameter, []).append(fqn)
    for parameter, fqns in names.items():
        yield fqns, parameter


def _unit_of(fqn: str, boundaries: set[str]) -> str:
    """Return the innermost unit module above a parameter; "" is the root."""
    module = fqn.rpartition(".")[0]
    while module and module not in boundaries:
        module = module.rpartition(".")[0]
    return module


def _home(names: Sequence[str], boundaries: set[str]) -> str:
    """Return the module whose forward bounds the parameter's life: the common ancestor of the units that use
    it."""
    homes = [_unit_of(fqn, boundaries) for fqn in names]
    common = homes[0]
    # Containers (ModuleList, ModuleDict) have no forward of their own, so climb to a module that is a unit or
    # the root.
    while common and not (
        common in boundaries and all(f"{home}.".startswith(f"{common}.") for home in homes)
    ):
        common = common.rpartition(".")[0]
    return common


def _is_own(names: Sequence[str], module: str, boundaries: set[str]) -> bool:
    return all(_unit_of(fqn, boundaries) == module for fqn in names)


def _unit_name(module: str) -> str:
    return module or ROOT_UNIT


def _module_of(unit: str) -> str:
    return "" if unit == ROOT_UNIT else unit


def _numel(module: nn.Module, *, recurse: bool) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse=recurse))


def _default_boundaries(model: nn.Module, min_unit_numel: int, joined_numel: int) -> list[str]:
    def visit(layers: plain.Layers, name: str) -> list[tuple[str, bool]]:
        """Return the boundaries within a module, and whether each is a block of a list."""
        found: list[tuple[str, bool]] = []
        if name and sum(_numel(layer, recurse=False) for layer in layers) >= min_unit_numel:
            found.append((name, False))
        is_list = isinstance(layers[-1], nn.ModuleList)
        children: dict[nn.Module, str] = {}
        for child_name, child in plain.children_of(layers):
            children.setdefault(child, child_name)
        for child, child_name in children.items():
            fqn, inside = plain.joined(name, child_name), plain.layers_of(child)
            is_block = is_list and _numel(child, recurse=True) >= min_unit_numel
            if is_block and _has_forward(inside):
                found.append((fqn, True))
            else:
                found.extend(visit(inside, fqn))
        is_joined = len(found) > 1 and not any(is_block for _, is_block in found) and _has_forward(layers)
        if is_joined and _numel(layers[0], recurse=True) <= joined_numel:
            found = [(name, False)] if name else []
        return found

    return [name for name, _ in visit(plain.layers_of(model), "")]


def _has_forward(layers: plain.Layers) -> bool:
    return type(layers[-1]).forward is not nn.Module.forward


def _chosen_boundaries(model: nn.Module, wanted: Sequence[str | type[nn.Module]]) -> Iterator[str]:
    modules = list(plain.all_modules(model))
    for entry in wanted:
        found = [name for name, module in modules if name and _matches(name, module, entry)]
        if not found:
            shown = entry if isinstance(entry, str) else entry.__name__
            classes = sorted({type(module).__name__ for _, module in modules})
            raise LayoutError(
                f"unit_modules names {shown!r}, which is neither a module of the model nor one of its "
                f"classes {classes}"
            )
        yield from found


def _with_leaves(model: nn.Module, boundaries: set[str], leaves: LeafModuleConfig) -> set[str]:
    """Return the boundaries with the leaf modules added, and without those inside of a leaf."""
    found: set[str] = set()
    for name, module in plain.all_modules(model):  # outer ones first
        if name and _is_leaf(name, module, leaves) and not _is_below(name, found):
            found.add(name)
    return found | {name for name in boundaries if not _is_below(name, found)}


def _is_leaf(name: str, module: nn.Module, leaves: LeafModuleConfig) -> bool:
    kind = type(module)
    return (
        name in leaves.names
        or name.endswith(leaves.name_suffixes or ("\0",))
        or not {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}.isdisjoint(leaves.classes)
    )


def _is_below(name: str, modules: set[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _matches(name: str, module: nn.Module, entry: str | type[nn.Module]) -> bool:
    if isinstance(entry, str):
        return entry in (name, type(module).__name__)
    return isinstance(module, entry)


def parameters_by_fqn(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter under every name it has."""
    return dict(plain.named_parameters(model, remove_duplicate=False))


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a state dict would hold, by fqn."""
    kept = {}
    for prefix, module in plain.all_modules(model):
        for name, buffer in module._buffers.items():  # named_buffers would omit a second name
            if buffer is not None and name not in module._non_persistent_buffers_set:
                kept[plain.joined(prefix, name)] = buffer
    return kept
