"""The update of a step by a rule that cannot work element by element: all units at once.

`StepExecutor` calls it; the rules are `LambRule`, `OneBitAdamRule` and `ForeignRule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from zerotrain.contract.config import ConfigError
from zerotrain.runtime.offload.resident import ResidentStates
from zerotrain.runtime.offload.tiers import StateTiers, TierName
from zerotrain.runtime.optim.groups import Hyper
from zerotrain.runtime.optim.state_registry import StateRegistry
from zerotrain.runtime.zero.gradients import UnitGradients
from zerotrain.runtime.zero.shards import Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterRun:
    """The part of one parameter that lies in a rank's interval of its unit; empty when start >= stop."""

    fqn: str
    start: int
    """First element in the interval's tensors."""
    stop: int
    group: int
    """Index of the parameter's group."""
    hyper: Hyper


@dataclass(frozen=True, kw_only=True, slots=True)
class JointUnit:
    """One unit to update: `grads` and the tensors of `states` are 1-D and cover `states.interval`."""

    states: ResidentStates
    grads: torch.Tensor
    accumulator: torch.Tensor
    """`UnitGradients.accumulator`."""
    segments: tuple[ParameterRun, ...]
    """Parts of every parameter of the unit, in layout order, on every rank."""


@runtime_checkable
class JointRule(Protocol):
    """An optimizer that needs more than one slice at a time."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """State streams per element beside the master weight; they start as zeros."""
        ...

    def update_units(self, units: Sequence[JointUnit], step: int, *, grad_scale: float) -> None:
        """Update the masters and states of all units with `grads * grad_scale`. Collective; `step` from 1."""
        ...


@torch.no_grad()
def update_jointly(
    rule: JointRule,
    registry: StateRegistry,
    parts: Sequence[UnitGradients],
    hypers: Sequence[Hyper],
    *,
    step: int,
    grad_scale: float,
) -> None:
    """Update the units of `parts`, which are in forward order; `hypers` by group. Collective."""
    units = [_joint_unit(part, registry, hypers) for part in parts]
    rule.update_units(units, step, grad_scale=grad_scale)
    for unit in units:
        unit.states.round_weights()


def _joint_unit(part: UnitGradients, registry: StateRegistry, hypers: Sequence[Hyper]) -> JointUnit:
    states = registry.states[part.unit.name]
    assert isinstance(states, ResidentStates)
    low, high = states.interval
    runs = tuple(
        ParameterRun(
            fqn=segment.fqn,
            start=max(low, segment.start) - low,
            stop=min(high, segment.stop) - low,
            group=registry.group_of[segment.fqn],
            hyper=hypers[registry.group_of[segment.fqn]],
        )
        for segment in part.unit.layout.segments
    )
    return JointUnit(states=states, grads=part.shard, accumulator=part.accumulator, segments=runs)


def refuse_offload(name: str, tiers: StateTiers, placement: Placement) -> None:
    """Raise ConfigError for a joint rule, by its optimizer's name, where states are not whole tensors."""
    others = "Use AdamW, Adam, Adagrad, Lion or SGD"
    if tiers.name is not TierName.DEVICE:
        raise ConfigError(
            "zero_optimization.offload_optimizer.device",
            f"must be none with {name}, which needs the states of all units at once",
            tiers.name.value,
            f'{others}, or set it to "none".',
        )
    if placement.splits_masters:
        raise ConfigError(
            "bf16.store_param_remainders",
            f"must be false with {name}, which needs whole fp32 weights",
            True,
            f"{others}, or set it to false.",
        )
