"""Whole parameters outside of forward and backward: `full_parameters`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zerotrain.runtime.zero.core import Core
from zerotrain.runtime.zero.placeholder import owner_of
from zerotrain.runtime.zero.unit import Unit, UnitState


@contextmanager
def full_parameters(target: nn.Module | nn.Parameter, *, write: bool = False) -> Iterator[None]:
    """Within the context every parameter of a module (or the one given) is whole, on every rank. Collective.

    With `write`, what rank 0 wrote into the parameters (in place, under `torch.no_grad()`) reaches the
    masters of all ranks when the context ends. Without it, changes are undefined. Whole units are gathered: a
    module's neighbours in the same unit are whole, too. Raises RuntimeError while the model is in forward or
    backward.
    """
    parameters = [target] if isinstance(target, nn.Parameter) else list(target.parameters())
    opened: dict[Unit, Core] = {}
    for parameter in parameters:
        core = owner_of(parameter)
        if isinstance(core, Core):
            unit = core.unit_of(parameter)
            opened[unit] = core
    for unit, core in opened.items():
        core.check_idle(unit)
    for unit in opened:
        unit.require(UnitState.HELD)
    try:
        yield
        if write:
            for unit, core in opened.items():
                _write_back(unit, core)
    finally:
        for unit in opened:
            unit.free()


@torch.no_grad()
def _write_back(unit: Unit, core: Core) -> None:
    core.comm.broadcast(unit.full.tensor, label=unit.name)
    if unit.placement.params_sharded:
        unit.shard.copy_(unit.full.tensor[unit.start : unit.stop])
    for listener in core.on_weights_written:
        listener(unit)
