"""Rebuilding of units when the user freezes or unfreezes parameters between steps.

The engine calls it when a forward pass begins after a step, and in the step where it saw no forward pass
(modules without hooks were called). Parameters that were trained before keep master weight and optimizer
states bit for bit; a parameter that begins to be trained has zero states, as in torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import nn

from zerotrain.runtime.comm.group import CommError
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.step import RELAYOUT_MARK
from zerotrain.runtime.zero.build import build_unit
from zerotrain.runtime.zero.gradients import UnitGradients
from zerotrain.runtime.zero.layout import LayoutError, ModelLayout
from zerotrain.runtime.zero.names import named_parameters
from zerotrain.runtime.zero.plan import parameters_by_fqn
from zerotrain.runtime.zero.repartition import Repartition
from zerotrain.runtime.zero.sharded_model import ShardedModel
from zerotrain.runtime.zero.unit import Unit


class Relayout:
    """Watches `requires_grad` of the parameters of one engine."""

    def __init__(self, core: ShardedModel, optimizer: ZeroOptimizer, plan: Callable[[], ModelLayout]) -> None:
        """`plan` lays the model out as it is now."""
        self._core = core
        self._optimizer = optimizer
        self._plan = plan
        self._units: list[Unit] = []
        self._known: set[int] = set()
        """`id` of each parameter of `_units`."""

    def changed(self) -> list[str]:
        """Return the parameters that were frozen or unfrozen since the units were made; no communication."""
        found: list[str] = []
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self._core.units:
                trained = unit.layout.trainable
                now = list(map(_REQUIRES_GRAD, unit.parameters))
                if (not trained) in now:
                    pairs = zip(unit.layout.segments, now, strict=True)
                    found += [segment.fqn for segment, each in pairs if each is not trained]
        return found

    def moved(self) -> list[str]:
        """Return the parameters of the model that belong to no unit or lie outside its memory; no
        communication.

        A parameter that was removed from the model, or a new one that is frozen, is harmless.
        """
        units, model = self._core.units, self._core.model
        found: list[str] = []
        with torch._C.DisableTorchFunctionSubclass():
            for unit in units:
                # Only the engine shows and hides the parameters of other units.
                if not unit.placement.params_sharded and unit.pending is None:
                    found += _elsewhere(unit)
        if units is not self._units:
            self._units = units
            self._known = {id(parameter) for unit in units for parameter in unit.parameters}
        known = self._known
        if not known.issuperset(map(id, _members(model))):
            names = {segment.fqn for unit in units for segment in unit.layout.segments}
            for name, each in named_parameters(model):
                if id(each) not in known and (name in names or each.requires_grad):
                    found.append(name)
        return found

    def follow(self, *, at_step: bool = False) -> None:
        """Rebuild the units of parameters that changed, if any did. Collective if so. `at_step`: gradients of
        the step may exist already, and are kept.

        Raises CommError when the ranks changed different parameters, GroupError when a parameter that is
        trained now is in no parameter group, LayoutError when nothing is left to train or a parameter is not
        where the engine trains it.
        """
        if away := self.moved():
            raise LayoutError(
                f"parameters {away[:5]} were replaced or moved after initialize (by an assignment, .to(), "
                ".cpu() or load_state_dict(assign=True)), but the engine trains the memory that it took "
                "over; convert and replace before initialize, and write values in place within "
                "full_parameters(model, write=True)"
            )
        changed = self.changed()
        if not changed:
            return
        if not self._core.gradients:
            raise LayoutError(
                f"parameters {changed[:5]} were unfrozen, but every parameter was frozen when initialize "
                "took the model over, so this engine is for evaluation only and has no optimizer for them; "
                "set requires_grad on what should be trained before initialize (after close() of this engine)"
            )
        self._core.updates.settle_all()  # also those of now frozen units: the step came before
        if self._agree(changed):
            self._core.writes.settle()  # no pass is running any more
        layout = self._plan()
        if not any(unit.trainable for unit in layout.units):
            raise LayoutError("every parameter is frozen; set requires_grad on what should be trained")
        self._optimizer.follow_freezing()
        self._optimizer.registry.admit(
            segment.fqn for unit in layout.units if unit.trainable for segment in unit.segments
        )
        if at_step:
            self._core.finish_backward()
            for part in self._core.gradients.values():
                part.settle()
        self._rebuild(layout, keeps_gradients=at_step)

    def _agree(self, changed: list[str]) -> bool:
        """Check that all ranks changed the same parameters; return whether any wrote into weights. The record
        has the size of a step's, so that ranks that continued with a step receive it and detect the
        difference."""
        fingerprint = float(zlib.crc32("|".join(sorted(changed)).encode()))
        record = [RELAYOUT_MARK, fingerprint, float(self._core.writes.found()), *([0.0] * 5)]
        rows = self._core.comm.gather_record(record, label="change of requires_grad")
        mismatched = [rank for rank, row in enumerate(rows) if row[:2] != rows[self._core.comm.rank][:2]]
        if mismatched:
            raise CommError(
                f"rank {self._core.comm.rank} changed requires_grad of {changed[:5]} since the last step, "
                f"ranks {mismatched} did not, or of others; freeze and unfreeze the same parameters on "
                "every rank"
            )
        return any(row[2] for row in rows)

    def _rebuild(self, layout: ModelLayout, *, keeps_gradients: bool) -> None:
        core, registry = self._core, self._optimizer.registry
        kept = {unit.layout: unit for unit in core.units if unit.layout in set(layout.units)}
        stale = [unit for unit in core.units if unit.layout not in kept]
        fresh = [each for each in layout.units if each not in kept]
        parameters = parameters_by_fqn(core.model)
        if core.options.tier is not None:
            core.options.tier.prepare(layout, core.ledger)
        made: dict[str, Unit] = {}
        gradients = dict(core.gradients)
        self._optimizer.layout = layout
        registry.tiers.plan(layout, replicated=not core.options.placement.states_sharded)
        for module in dict.fromkeys([unit.layout.module for unit in stale]):
            parts = Repartition(core.comm)
            leaving = [unit for unit in stale if unit.layout.module == module]
            for unit in leaving:
                parts.add(unit, registry.states.get(unit.name))
                if keeps_gradients and unit.layout.trainable:
                    parts.add_gradients(gradients[unit.name])
            core.comm.gather_record([0.0])  # from here on no rank reads the old shards
            for unit in leaving:
                if unit.layout.trainable:
                    gradients.pop(unit.name).dispose()
                    registry.forget(unit)
                unit.dispose()
            for each in (each for each in fresh if each.module == module):
                unit = made[each.name] = build_unit(core, each, layout, parameters, parts)
                if each.trainable:
                    parts.show_late_gradients(unit)
                    gradients[each.name] = UnitGradients(unit, core.ledger)
                    parts.restore_gradients(gradients[each.name])
                    states = registry.add(unit, layout, self._optimizer.rule.kinds, core.ledger)
                    new = parts.restore(unit, states)
                    registry.born.update(dict.fromkeys(new, self._optimizer.num_updates))
                    registry.index(unit, layout)
        units = [kept[each] if each in kept else made[each.name] for each in layout.units]
        ordered = {unit.name: gradients[unit.name] for unit in units if unit.layout.trainable}
        core.replace_units(layout, units, ordered)


# Every step looks at every parameter, so torch's getters are called without a Python frame.
_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__get__
_DATA_PTR = torch.Tensor.data_ptr


def _elsewhere(unit: Unit) -> list[str]:
    """Return the parameters of a unit with whole weights that lie outside its memory."""
    base, size = unit.full.tensor.data_ptr(), unit.full.tensor.element_size()
    segments = unit.layout.segments
    now, due = list(map(_DATA_PTR, unit.parameters)), [base + size * each.start for each in segments]
    if now == due:
        return []
    found = zip(segments, now, due, strict=True)
    return [segment.fqn for segment, place, right in found if place != right and segment.numel]


def _members(model: nn.Module) -> list[nn.Parameter]:
    """Return the model's parameters, once for each module that has them; `modules()` would take twice as
    long."""
    found: list[nn.Parameter | None] = []
    seen: set[nn.Module] = set()
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in seen:
            seen.add(module)
            found += module._parameters.values()
            waiting += module._modules.values()
    return [each for each in found if each is not None]
