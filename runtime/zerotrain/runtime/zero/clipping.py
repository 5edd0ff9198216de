"""Norms and clipping, over all ranks, of gradients that engines keep: what `torch.nn.utils` does with
`p.grad`.

Everything here is collective over the ranks of the engines whose parameters are given. Stages 0 and 1 first
average what they would average in the step. Called by `optimizer.clip_grad_norm_` and, through
`torch_calls.py`, by torch's own functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zerotrain.runtime.comm.model_parallel import is_divided
from zerotrain.runtime.comm.sums import sums_of_squares
from zerotrain.runtime.zero.gradients import UnitGradients
from zerotrain.runtime.zero.placeholder import owner_of
from zerotrain.runtime.zero.sharded_model import ShardedModel

CLIP_EPSILON = 1e-6
"""Constant that is added to the norm, as in torch.nn.utils.clip_grad_norm_."""


@dataclass(frozen=True, slots=True)
class GradientSlot:
    """Position of one parameter's gradient: the gradients of its unit, and its index there."""

    gradients: UnitGradients
    index: int

    def own(self) -> torch.Tensor:
        """Return the part of the ranks' average that this rank owns; 1-D fp32, may be empty."""
        unit = self.gradients.unit
        segment = unit.layout.segments[self.index]
        start, stop = max(unit.start, segment.start), min(unit.stop, segment.stop)
        return self.gradients.own_part[start - unit.start : max(start, stop) - unit.start]

    def counted(self, core: ShardedModel) -> torch.Tensor:
        """Return `own`, or nothing if another rank of the model-parallel group counts this parameter."""
        parallel, own = core.comm.model_parallel, self.own()
        if parallel is None or parallel.rank == 0 or is_divided(self.gradients.unit.parameters[self.index]):
            return own
        return own[:0]


Owned = Mapping[ShardedModel, Sequence[GradientSlot]]
"""Slots by engine, in the order of the parameters, which is the same on every rank."""


def split(parameters: Iterable[Any]) -> tuple[Owned, list[Any]]:
    """Split parameters into those that engines train, as slots, and others. Frozen ones have no gradient, and
    are left out of both."""
    slots: dict[ShardedModel, dict[int, GradientSlot]] = {}
    owned: dict[ShardedModel, list[GradientSlot]] = {}
    others: list[Any] = []
    for parameter in parameters:
        core = owner_of(parameter)
        if not isinstance(core, ShardedModel) or core.is_closed:
            others.append(parameter)
            continue
        if core not in slots:
            slots[core], owned[core] = _slots_in(core), []
        if (slot := slots[core].get(id(parameter))) is not None:
            owned[core].append(slot)
    return owned, others


def settle(core: ShardedModel, what: str) -> bool:
    """Average this step's gradients so far. Collective.

    Returns False if there are none, right after a step whose update runs in the background. Raises
    RuntimeError in forward and backward, and if each rank keeps its own gradient.
    """
    core.check_idle(what)
    if core.updates:
        return False
    for part in core.gradients.values():
        part.settle()
    if core.reducer.keeps_local():
        raise RuntimeError(
            f"{what} is not possible: after its warm-up the 1-bit optimizer takes every rank's own gradient, "
            "so there is no average to read; remove the call, or use AdamW"
        )
    core.reducer.reduce_replicated()
    late = core.comm.gather_record([float(core.reducer.has_late)], label=what)
    if any(row[0] for row in late):
        core.reducer.reduce_late()
    return True


def total_of_powers(
    core: ShardedModel, slots: Sequence[GradientSlot], norm_type: float, *, what: str
) -> float:
    """Return the sum over all ranks of |g| ** norm_type, for inf the largest |g|; without the loss scale.
    Collective."""
    parts = [part for slot in slots if (part := slot.counted(core)).numel()]
    mine = _combined(_sums_of_powers(parts, norm_type), norm_type)
    total = _combined([row[0] for row in core.comm.gather_record([mine], label=what)], norm_type)
    if (parallel := core.comm.model_parallel) is not None:
        total = _combined([row[0] for row in parallel.combine([total], core.comm.device)], norm_type)
    scale = core.callbacks.gradient_scale()
    return total / scale if math.isinf(norm_type) else total / scale**norm_type


def norm_of(powers: Sequence[float], norm_type: float) -> float:
    """Return the norm over all parts, from their `total_of_powers`."""
    total = _combined(powers, norm_type)
    if math.isinf(norm_type) or not math.isfinite(total):
        return total
    return math.sqrt(total) if norm_type == 2.0 else total ** (1.0 / norm_type)


def check_norm_type(norm_type: float) -> float:
    """Raise ValueError for an order with which the norms of parts do not give the norm of the whole."""
    order = float(norm_type)
    if not order > 0.0:
        raise ValueError(
            f"norm_type must be positive or inf for gradients that an engine keeps; got {norm_type}. Read "
            "them with zerotrain.runtime.get_full_grad for another one"
        )
    return order


def scale(owned: Owned, factor: float) -> None:
    """Multiply gradients, averaged or not."""
    for slots in owned.values():
        for slot in slots:
            slot.gradients.slots.change(slot.index, lambda part: part.mul_(factor))


def clip_factor(max_norm: float, norm: float) -> float:
    """Return torch's clipping factor: at most 1, and NaN for a NaN norm."""
    factor = float(max_norm) / (norm + CLIP_EPSILON)
    return 1.0 if factor > 1.0 else factor


def clip_grad_norm_(
    parameters: Iterable[Any], max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Run `torch.nn.utils.clip_grad_norm_` for engines' parameters only; return the norm before, over all
    ranks."""
    owned, _ = split(parameters)
    norm = total_norm(owned, norm_type, error_if_nonfinite=error_if_nonfinite, what="clip_grad_norm_")
    if (factor := clip_factor(max_norm, norm)) != 1.0:
        scale(owned, factor)
    return as_tensor(norm, owned)


def total_norm(
    owned: Owned,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
    what: str,
    others: Callable[[], float] = lambda: 0.0,
) -> float:
    """Return the norm of these parameters' gradients and of others, whose norm `others()` returns.
    Collective.

    With `error_if_nonfinite`, raises RuntimeError as torch does for a norm that is not finite.
    """
    order = check_norm_type(norm_type)
    # Settle every engine before the first norm: the ranks must agree on the order of collectives.
    present = [(core, slots) for core, slots in owned.items() if settle(core, what)]
    powers = [total_of_powers(core, slots, order, what=what) for core, slots in present]
    rest = others()
    norm = norm_of([*powers, rest if math.isinf(order) else rest**order], order)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
            "cannot be clipped. To disable this error and scale the gradients by the non-finite norm anyway, "
            "set `error_if_nonfinite=False`"
        )
    return norm


def clamp(owned: Owned, bound: float, *, what: str) -> None:
    """Clamp every element of the averaged gradients. Collective."""
    for core, slots in owned.items():
        if settle(core, what):
            limit = float(bound) * core.callbacks.gradient_scale()
            clamped = partial(torch.Tensor.clamp_, min=-limit, max=limit)
            for slot in slots:
                slot.gradients.slots.change(slot.index, clamped)


def unscale(owned: Owned, factor: float, *, what: str) -> bool:
    """Multiply the averaged gradients; return whether any rank found a non-finite one. Collective."""
    found = False
    for core, slots in owned.items():
        if not settle(core, what):
            continue
        sizes = _sums_of_powers([part for slot in slots if (part := slot.own()).numel()], math.inf)
        mine = float(not all(map(math.isfinite, sizes)))
        rows = core.comm.gather_record([mine], label=what)
        if (parallel := core.comm.model_parallel) is not None:
            rows = parallel.combine([float(any(row[0] for row in rows))], core.comm.device)
        found = found or any(row[0] for row in rows)
        if factor != 1.0:
            scale({core: slots}, factor)
    return found


def as_tensor(norm: float, owned: Owned) -> torch.Tensor:
    """Return a norm as torch does: 0-d fp32, on the device of the first engine."""
    core = next(iter(owned), None)
    return torch.tensor(norm, dtype=torch.float32, device=None if core is None else core.comm.device)


def _slots_in(core: ShardedModel) -> dict[int, GradientSlot]:
    return {
        id(parameter): GradientSlot(part, index)
        for part in core.gradients.values()
        for index, parameter in enumerate(part.unit.parameters)
    }


@torch.no_grad()
def _sums_of_powers(parts: Sequence[torch.Tensor], norm_type: float) -> list[float]:
    """Return the sum of |g| ** norm_type of each part, for inf its largest |g|."""
    if norm_type == 2.0:
        return sums_of_squares(parts)
    if math.isinf(norm_type):
        return [float(part.abs().max()) for part in parts]
    return [float(part.double().abs().pow(norm_type).sum()) for part in parts]


def _combined(values: Sequence[float], norm_type: float) -> float:
    """Return the sum, or for inf the largest; NaN if any value is NaN."""
    if not math.isinf(norm_type):
        return sum(values)
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)
