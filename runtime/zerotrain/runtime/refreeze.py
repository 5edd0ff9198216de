"""Rebuilding of units when the user freezes or unfreezes parameters.

[Note: when a change counts] A parameter that begins to be trained gets a place for its gradient when a
forward pass begins. A frozen one loses its place, with master weight and optimizer states, in the step: if it
is frozen then and was frozen in every backward pass of the step, so that torch would have no gradient for it
either. So parameters may be frozen for some passes (a discriminator while the generator is updated, adapters
while the base model gives reference outputs) and lose nothing.

Parameters that stay trained keep master weight and optimizer states bit for bit; one that begins to be
trained has zero states, as in torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from zerotrain.runtime.comm.group import CommError
from zerotrain.runtime.optim.groups import GroupError
from zerotrain.runtime.optim.joint import JointRule
from zerotrain.runtime.optim.lamb import LambRule
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.optim.update import UpdateRule
from zerotrain.runtime.step_record import RELAYOUT_MARK
from zerotrain.runtime.zero.build import build_unit
from zerotrain.runtime.zero.callers import has_swapped_parameters
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
        self._idle: set[str] = set()
        """Trained parameters that were frozen in every backward pass since the last step."""

    def changed(self, *, trained: bool) -> dict[str, nn.Parameter]:
        """Return the parameters of trained units that are frozen now, or of frozen units that are trained
        now; no communication."""
        found: dict[str, nn.Parameter] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self._core.units:
                if unit.layout.trainable is not trained:
                    continue
                now = list(map(_REQUIRES_GRAD, unit.parameters))
                if (not trained) in now:
                    rows = zip(unit.layout.segments, unit.parameters, now, strict=True)
                    found.update((segment.fqn, each) for segment, each, on in rows if on is not trained)
        return found

    def note_backward(self) -> bool:
        """Note, as a backward pass begins, which parameters it gives no gradient because they are frozen;
        return whether it gives any. No communication."""
        is_first = not self._core.has_gradients
        if not (is_first or self._idle):
            return True
        frozen = self.changed(trained=True)
        self._idle = set(frozen) if is_first else self._idle & set(frozen)
        return len(frozen) < sum(len(part.unit.parameters) for part in self._core.gradients.values())

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

    def before_pass(self) -> None:
        """Give places to the parameters that begin to be trained. Collective if there are some.

        Raises CommError when the ranks changed different parameters, GroupError when a parameter that is
        trained now is in no parameter group, LayoutError when a parameter is not where the engine trains it.
        """
        self.check_places()
        if begun := self.changed(trained=False):
            self._follow(begun, keeps=self.changed(trained=True).values(), at_step=False)

    def before_step(self, *, is_checked: bool) -> None:
        """Drop the states of parameters that are frozen and have no gradient. Collective if there are some.
        Gradients of the step are kept. `is_checked`: `before_pass` was called since the last step.

        Raises LayoutError when nothing is left to train, and what `before_pass` raises.
        """
        core, changed = self._core, {}
        if not is_checked:
            self.check_places()
            changed = self.changed(trained=False)
        frozen: Mapping[str, nn.Parameter] = {}
        if self._idle or not core.has_gradients:
            frozen = self.changed(trained=True)
        keeps = []
        for name, parameter in frozen.items():
            if core.has_gradients and name not in self._idle:
                keeps.append(parameter)
            else:
                changed[name] = parameter
        if changed:
            self._follow(changed, keeps=keeps, at_step=True)

    def check_places(self) -> None:
        """Raise LayoutError where a parameter is not where the engine trains it."""
        if not (away := self.moved()) or has_swapped_parameters():
            return
        names = {segment.fqn for unit in self._core.units for segment in unit.layout.segments}
        if added := [name for name in away if name not in names]:
            raise LayoutError(
                f"parameters {added[:5]}{_and_more(added)} were added to the model after initialize (by an "
                "adapter, such as PEFT's add_adapter, or a new layer), so the engine has no optimizer states "
                "for them. Add them before initialize: save the weights without them, close() this engine, "
                "add them to a model that loads these weights, and initialize that one. If they are not to "
                "be trained, set requires_grad_(False) on them (model.set_adapter of a known adapter does)"
            )
        raise LayoutError(
            f"parameters {away[:5]}{_and_more(away)} were replaced or moved after initialize (by an "
            "assignment, .to(), .cpu() or load_state_dict(assign=True)), but the engine trains the memory "
            "that it took over; convert and replace before initialize, and write values in place within "
            "full_parameters(model, write=True)"
        )

    def _follow(
        self, parameters: Mapping[str, nn.Parameter], *, keeps: Iterable[nn.Parameter], at_step: bool
    ) -> None:
        """Rebuild the units of parameters that changed; `keeps` are frozen now and stay in trained units.
        `at_step`: gradients of the step may exist already, and are kept."""
        changed = list(parameters)
        if not self._core.gradients:
            raise LayoutError(
                f"parameters {changed[:5]} were unfrozen, but every parameter was frozen when initialize "
                "took the model over, so this engine is for evaluation only and has no optimizer for them; "
                "set requires_grad on what should be trained before initialize (after close() of this engine)"
            )
        self._check_names()
        self._core.updates.settle_all()  # also those of now frozen units: the step came before
        if self._agree(changed):
            self._core.writes.settle()  # no pass is running any more
        with _trained(keeps):
            layout = self._plan()
        if not any(unit.trainable for unit in layout.units):
            raise LayoutError(
                "step() is not possible: every parameter is frozen, so nothing is left to train; set "
                "requires_grad on what should be trained before the forward pass, leave step() out while "
                "everything is frozen, or, for evaluation only, close() this engine and initialize the "
                "frozen model"
            )
        _check_rule(self._optimizer.rule)
        self._optimizer.registry.admit(
            segment.fqn for unit in layout.units if unit.trainable for segment in unit.segments
        )
        if at_step:
            self._core.finish_backward()
            for part in self._core.gradients.values():
                part.settle()
        self._rebuild(layout, keeps_gradients=at_step)

    def _check_names(self) -> None:
        """Raise LayoutError unless every parameter has the name that it had before."""
        found = parameters_by_fqn(self._core.model)
        moved = [
            segment.fqn
            for unit in self._core.units
            for segment, parameter in zip(unit.layout.segments, unit.parameters, strict=True)
            if found.get(segment.fqn) is not parameter
        ]
        if moved:
            raise LayoutError(
                f"requires_grad was changed in a model whose parameters {moved[:5]}{_and_more(moved)} are no "
                "longer under the names that they had in initialize; move or replace modules before "
                "initialize, or change requires_grad before they are moved"
            )

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
            parts = Repartition(core.comm, averages=core.options.averages)
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
                    gradients[each.name] = UnitGradients(unit, core.ledger, core.options.make_moved)
                    parts.restore_gradients(gradients[each.name])
                    states = registry.add(unit, self._optimizer.rule.kinds, core.ledger)
                    new = parts.restore(unit, states)
                    registry.born.update(dict.fromkeys(new, self._optimizer.num_updates))
                    registry.index(unit)
        units = [kept[each] if each in kept else made[each.name] for each in layout.units]
        ordered = {unit.name: gradients[unit.name] for unit in units if unit.layout.trainable}
        core.replace_units(layout, units, ordered)


# Every step looks at every parameter, so torch's getters are called without a Python frame.
_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__get__
_DATA_PTR = torch.Tensor.data_ptr


@contextmanager
def _trained(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Set `requires_grad` of frozen parameters within the context."""
    frozen = list(parameters)
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


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


def _and_more(names: Sequence[str]) -> str:
    """Return how many names a message that lists five leaves out."""
    return f" and {len(names) - 5} more" if len(names) > 5 else ""


def _check_rule(rule: UpdateRule | JointRule) -> None:
    """Raise GroupError for a rule whose own state cannot follow units that are divided anew."""
    if isinstance(rule, JointRule) and not isinstance(rule, LambRule):
        raise GroupError(
            f"{type(rule).__name__} cannot follow a change of requires_grad after initialize; use AdamW, or "
            "freeze before"
        )
