"""Makes units from a layout and finds the modules that need hooks. Called by `ShardedModel`, and by
`relayout` when parameters were frozen or unfrozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerotrain.runtime.zero.gradients import UnitGradients
from zerotrain.runtime.zero.layout import ModelLayout, UnitLayout
from zerotrain.runtime.zero.ledger import MemoryLedger
from zerotrain.runtime.zero.placeholder import adopt
from zerotrain.runtime.zero.plan import parameters_by_fqn
from zerotrain.runtime.zero.unit import InitialValues, Unit

if TYPE_CHECKING:
    from zerotrain.runtime.zero.sharded_model import ShardedModel


def build_unit(
    core: ShardedModel,
    layout: UnitLayout,
    plan: ModelLayout,
    parameters: Mapping[str, nn.Parameter],
    values: InitialValues,
) -> Unit:
    """Build one unit from its parameters, so that at most one unit is in memory twice at any time.
    Collective."""
    placement, tier = core.options.placement, core.options.tier
    if layout.stays_whole:
        placement, tier = replace(placement, params_sharded=False), None
    members = [parameters[segment.fqn] for segment in layout.segments]
    for segment, parameter in zip(layout.segments, members, strict=True):
        move_to(parameter, core.comm.device)
        adopt(parameter, core, segment.fqn)
    unit = Unit(
        layout,
        members,
        plan=plan,
        placement=placement,
        comm=core.comm,
        ledger=core.ledger,
        values=values,
        tier=tier,
    )
    unit.staging = core.options.staging
    if placement.params_sharded:
        unit.weights = core.traffic.of_weights()
    return unit


def move_to(parameter: nn.Parameter, device: torch.device) -> None:
    """Move value and gradient to the device, as `Module.to` does; the object stays."""
    if parameter.device == device:
        return
    parameter.data = parameter.data.to(device)
    if parameter.grad is not None:
        parameter.grad.data = parameter.grad.data.to(device)


def build_units(
    core: ShardedModel,
    layout: ModelLayout,
    values: InitialValues,
    on_made: Callable[[Unit, MemoryLedger], None],
) -> list[Unit]:
    """Build all units of a layout; `on_made` is called for each before the next one is made. Collective."""
    if core.options.tier is not None:
        core.options.tier.prepare(layout, core.ledger)
    parameters = parameters_by_fqn(core.model)
    units = []
    for each in layout.units:
        units.append(unit := build_unit(core, each, layout, parameters, values))
        on_made(unit, core.ledger)
    return units


def busy_modules(
    units: Sequence[Unit],
    gradients: Mapping[str, UnitGradients],
    *,
    reduces_early: bool,
    waits: bool = False,
) -> dict[str, list[Unit]]:
    """Return the units by the module whose calls bound their lives, the root first.

    Units that need no hooks (replicated, or frozen and whole) are left out. `waits`: trained units are
    waited for before use.
    """
    busy: dict[str, list[Unit]] = {"": []}
    for unit in units:
        is_transient = unit.layout.trainable and (
            waits or reduces_early or not gradients[unit.name].is_direct
        )
        if unit.placement.params_sharded or is_transient:
            busy.setdefault(unit.layout.module, []).append(unit)
    return busy
