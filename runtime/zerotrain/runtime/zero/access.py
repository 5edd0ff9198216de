"""Access to whole parameters outside of forward and backward: `full_parameters`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zerotrain.runtime.zero.placeholder import fqn_of, owner_of
from zerotrain.runtime.zero.sharded_model import ShardedModel
from zerotrain.runtime.zero.unit import Unit, UnitState
from zerotrain.runtime.zero.writes import OutsideWrite


@contextmanager
def full_parameters(
    target: nn.Module | nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    *,
    write: bool = False,
    enabled: bool = True,
) -> Iterator[None]:
    """Make every parameter of a module (or those given) whole within the context, on every rank. Collective.

    Args:
        target: a module (with all below it), a parameter, or parameters. Those that no engine drives are left
            alone.
        modifier_rank: what this rank writes into the parameters (in place, under `torch.no_grad()`) is copied
            to weights and masters of all ranks when the context ends. None: what every rank writes alike into
            whole weights is kept, as outside of the context; writes into partitioned ones are refused.
        write: the same as `modifier_rank=0`.
        enabled: False does nothing.

    Contexts may be nested, also over the same parameters. Whole units are gathered: a module's neighbours in
    the same unit are whole, too. Forward and backward may run inside; `engine.step()` may not.

    Raises RuntimeError while the model is in forward or backward, ValueError for a rank that does not exist,
    OutsideWrite for written values that would be lost, on the ranks that own them. If the block raises,
    nothing is written back.
    """
    if not enabled:
        yield
        return
    rank = 0 if write and modifier_rank is None else modifier_rank
    opened = _units_of(target)
    for core in dict.fromkeys(opened.values()):
        core.check_idle("full_parameters")
        core.updates.settle_all()  # a pending update would overwrite what is written, and its states
        if rank is not None and not 0 <= rank < core.comm.world_size:
            raise ValueError(f"modifier_rank must be in [0, {core.comm.world_size}) or None; got {rank}")
    for unit, core in opened.items():
        unit.require(UnitState.HELD)
        core.holds[unit] += 1
    try:
        yield
        for unit, core in opened.items():
            is_kept = rank is not None or core.holds[unit] > 1 or not unit.placement.params_sharded
            _take_moved(unit, keeps=is_kept)
        if rank is not None:
            for core in dict.fromkeys(opened.values()):
                core.updates.settle_all()  # of a step within the context
            for unit, core in opened.items():
                _write_back(unit, core, rank)
        else:
            for unit, core in opened.items():
                if core.holds[unit] == 1:  # otherwise the outer context may write back
                    core.writes.check_held([unit])
    finally:
        for unit, core in opened.items():
            core.holds[unit] -= 1
            if not core.holds[unit]:
                del core.holds[unit]
                unit.free()


def locate(parameter: nn.Parameter) -> tuple[ShardedModel, Unit]:
    """Return the engine's core and the unit that hold a parameter. Raises ValueError if no engine drives
    it."""
    core = owner_of(parameter)
    if not isinstance(core, ShardedModel):
        raise ValueError(
            f"no engine drives this parameter of shape {tuple(parameter.shape)}; pass one of the model that "
            "zerotrain.runtime.initialize took over"
        )
    layout, _ = core.layout.find(fqn_of(parameter))
    return core, next(unit for unit in core.units if unit.name == layout.name)


def _units_of(target: nn.Module | nn.Parameter | Iterable[nn.Parameter]) -> dict[Unit, ShardedModel]:
    """Return units and cores in the order of the parameters, which is the same on every rank."""
    if isinstance(target, nn.Module):
        parameters: Iterable[nn.Parameter] = target.parameters()
    else:
        parameters = [target] if isinstance(target, nn.Parameter) else target
    found: dict[Unit, ShardedModel] = {}
    for parameter in parameters:
        if isinstance(owner_of(parameter), ShardedModel):
            core, unit = locate(parameter)
            found[unit] = core
    return found


@torch.no_grad()
def _take_moved(unit: Unit, *, keeps: bool) -> None:
    """Copy to their places the values of parameters that were given other memory (`p.data = ...`,
    `vector_to_parameters`). Raises OutsideWrite for them unless this `keeps` what is written."""
    for place, view in unit.views.moved():
        parameter, name = unit.parameters[place], unit.layout.segments[place].fqn
        values = parameter.data
        parameter.data = view
        if not keeps or values.shape != view.shape:
            raise OutsideWrite(
                f"parameter {name!r} of shape {tuple(view.shape)} was given a tensor of shape "
                f"{tuple(values.shape)} within full_parameters (p.data = ..., vector_to_parameters), which "
                "is lost; pass modifier_rank=0 (or write=True), and keep the shape"
            )
        parameter.copy_(values)


@torch.no_grad()
def _write_back(unit: Unit, core: ShardedModel, rank: int) -> None:
    # The memory is private to this rank even if it maps the others' shards: pages are copied when written.
    core.comm.broadcast(unit.full.tensor, label=unit.name, source=rank)
    unit.before_write()
    core.callbacks.on_weights_written(unit, unit.full.tensor)
    unit.keep_written()
    unit.publish().wait()  # mappings of all ranks' shards are whole when all have written
    core.writes.forget([unit])
