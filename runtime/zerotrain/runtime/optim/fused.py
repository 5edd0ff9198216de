"""Adam and AdamW on a GPU by torch's fused kernel: one pass over memory instead of ten.

Called through the rules of `rules.py` and `native.py`, whose way of doing it on CPU is another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from zerotrain.runtime.optim.rules import AdamRule, Alike, UpdateRule, tiles
from zerotrain.runtime.zero.rounding import join, split
from zerotrain.runtime.zero.state import EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedAdamRule(AdamRule):
    """Adam and AdamW, equal to `AdamRule` up to rounding. A `KernelRule`."""

    def runs_on(self, device: torch.device) -> bool:
        """Whether `task` can be called for tensors there."""
        return device.type == "cuda"

    def task(
        self,
        segments: Sequence[Alike],
        *,
        grad: torch.Tensor,
        grad_scale: float,
        weight: torch.Tensor | None,
        names: Sequence[str],
    ) -> Any:
        """A step over the elements of `grad`, which is scaled in place; see `KernelRule`."""
        divisor = None
        if grad_scale != 1.0:
            # 0 clips gradients that are not finite: finite ones become 0, the others no number.
            inverse = 1.0 / grad_scale if grad_scale else inf
            divisor = torch.full((), inverse, dtype=torch.float32, device=grad.device)
        return FusedTask(rule=self, segments=segments, grad=grad, divisor=divisor, weight=weight)

    def run(
        self,
        task: Any,
        master: torch.Tensor | None,
        states: Mapping[str, torch.Tensor],
        *,
        start: int = 0,
    ) -> None:
        """Do a part of a task, from element `start` on; `master` is fp32, or a remainder (int16), or None
        where the weight is it."""
        task.run(master, states, start)


def fused_rule(rule: UpdateRule) -> UpdateRule:
    """The rule with the fused kernel where there is one."""
    if isinstance(rule, AdamRule):
        return FusedAdamRule(
            decoupled=rule.decoupled, bias_correction=rule.bias_correction, amsgrad=rule.amsgrad
        )
    return rule


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedTask:
    """One step of one unit."""

    rule: FusedAdamRule
    segments: Sequence[Alike]
    grad: torch.Tensor
    divisor: torch.Tensor | None
    """fp32; None = 1."""
    weight: torch.Tensor | None

    def run(self, first: torch.Tensor | None, states: Mapping[str, torch.Tensor], start: int) -> None:
        """Update the elements that `states` are of; `first` as in `FusedAdamRule.run`."""
        stop = start + next(iter(states.values())).numel()
        for segment in self.segments:
            low, high = max(start, segment.start), min(stop, segment.stop)
            if low >= high:
                continue
            held = {kind: state[low - start : high - start] for kind, state in states.items()}
            weight = None if self.weight is None else self.weight[low:high]
            given = None if first is None else first[low - start : high - start]
            self._update(segment, slice(low, high), given, weight, held)

    def _update(
        self,
        segment: Alike,
        where: slice,
        first: torch.Tensor | None,
        weight: torch.Tensor | None,
        states: Mapping[str, torch.Tensor],
    ) -> None:
        if first is not None and first.dtype is torch.int16:
            assert weight is not None
            self._update_split(segment, where, first, weight, states)
            return
        master = weight if first is None else first
        assert master is not None
        self._step(segment, self.grad[where], master, states)
        if weight is not None and weight is not master:
            weight.copy_(master)

    def _update_split(
        self,
        segment: Alike,
        where: slice,
        remainder: torch.Tensor,
        weight: torch.Tensor,
        states: Mapping[str, torch.Tensor],
    ) -> None:
        grad = self.grad[where]
        for part in tiles(0, grad.numel(), grad.device, decodes=True):
            master = join(weight[part], remainder[part])
            self._step(segment, grad[part], master, {kind: state[part] for kind, state in states.items()})
            for target, half in zip((weight[part], remainder[part]), split(master), strict=True):
                target.copy_(half)

    def _step(
        self, segment: Alike, grad: torch.Tensor, master: torch.Tensor, states: Mapping[str, torch.Tensor]
    ) -> None:
        rule, hyper = self.rule, segment.hyper
        # The kernel corrects both moments by 1 - beta ** step, which is 1 at infinity.
        step = float(segment.step) if rule.bias_correction else inf
        kernel = torch._fused_adamw_ if rule.decoupled else torch._fused_adam_
        kernel(
            [master],
            [grad],
            [states[EXP_AVG]],
            [states[EXP_AVG_SQ]],
            [states[MAX_EXP_AVG_SQ]] if rule.amsgrad else [],
            [torch.full((), step, dtype=torch.float32, device=grad.device)],
            lr=hyper.lr,
            beta1=hyper.betas[0],
            beta2=hyper.betas[1],
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=rule.amsgrad,
            maximize=False,
            grad_scale=self.divisor,
        )
