"""Open engines of this process, and the gather of parameters that are used during a pass."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from zerotrain.runtime.zero.placeholder import ShardedParameter, owner_of, owners
from zerotrain.runtime.zero.sharded_model import ShardedModel
from zerotrain.runtime.zero.unit import UnitState
from zerotrain.runtime.zero.uses import show_for_pass, unit_of


def cores() -> list[ShardedModel]:
    """Return the cores of open engines."""
    return [owner for owner in owners() if isinstance(owner, ShardedModel) and not owner.is_closed]


def is_running(core: ShardedModel) -> bool:
    """Return whether forward or backward of the core's model is running."""
    return core.passes.entry is not None or core.in_backward


def gather_for_pass(parameters: Iterable[nn.Parameter]) -> bool:
    """Make sharded parameters whole until the end of the current forward or backward pass; return whether one
    runs. Collective: every rank calls it at the same point of the pass."""
    owned = [(parameter, owner_of(parameter)) for parameter in parameters]
    found = [
        (parameter, core)
        for parameter, core in owned
        if isinstance(core, ShardedModel) and not core.is_closed and is_running(core)
    ]
    for parameter, core in found:
        if isinstance(parameter, ShardedParameter) and not core.settle_for_use(parameter):
            unit = unit_of(core, parameter)
            show_for_pass(unit) if core.passes.entry is not None else unit.require(UnitState.BACKWARD)
    return bool(found)
