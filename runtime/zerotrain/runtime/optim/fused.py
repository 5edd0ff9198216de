"""Adam and AdamW on a GPU by torch's fused kernel: one pass over memory instead of ten.

Called through the rules of `rules.py` and `native.py`, which compute in another way on CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from zerotrain.runtime.optim.rules import AdamRule, Alike, Kernel, UnitStep, UpdateRule, tiles
from zerotrain.runtime.zero.rounding import join, split
from zerotrain.runtime.zero.state import EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedAdamRule(AdamRule):
    """Adam and AdamW, equal to `AdamRule` up to rounding. A `KernelRule`."""

    def kernel_for(self, device: torch.device) -> Kernel | None:
        """Return the fused kernel on CUDA, else None."""
        return FusedKernel(self) if device.type == "cuda" else None


def fused_rule(rule: UpdateRule) -> UpdateRule:
    """Return the rule with the fused kernel where there is one."""
    if isinstance(rule, AdamRule):
        return FusedAdamRule(
            decoupled=rule.decoupled, bias_correction=rule.bias_correction, amsgrad=rule.amsgrad
        )
    return rule


@dataclass(frozen=True, slots=True)
class FusedTask:
    """A step and the divisor of its gradients: fp32, None = 1."""

    step: UnitStep
    divisor: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """The fused kernel of a rule: a `Kernel`, for fp32 gradients, which are scaled in place."""

    rule: AdamRule

    def task(self, step: UnitStep) -> FusedTask:
        """Return the task of a step, as `Kernel`."""
        if step.grad_scale == 1.0:
            return FusedTask(step, None)
        # Clipping gives a scale of 0 for gradients that are not finite: finite ones become 0, the others NaN.
        inverse = 1.0 / step.grad_scale if step.grad_scale else inf
        return FusedTask(step, torch.full((), inverse, dtype=torch.float32, device=step.grad.device))

    def run(
        self, task: Any, master: torch.Tensor | None, states: Mapping[str, torch.Tensor], *, start: int = 0
    ) -> None:
        """Run a part of a task, as `Kernel`."""
        stop = start + next(iter(states.values())).numel()
        for segment in task.step.segments:
            low, high = max(start, segment.start), min(stop, segment.stop)
            if low >= high:
                continue
            held = {kind: state[low - start : high - start] for kind, state in states.items()}
            given = None if master is None else master[low - start : high - start]
            self._update(task, segment, slice(low, high), given, held)

    def _update(
        self,
        task: FusedTask,
        segment: Alike,
        where: slice,
        first: torch.Tensor | None,
        states: Mapping[str, torch.Tensor],
    ) -> None:
        grad, weight = task.step.grad[where], task.step.weight
        weight = None if weight is None else weight[where]
        if first is not None and first.dtype is torch.int16:
            assert weight is not None
            for part in tiles(0, grad.numel(), grad.device, decodes=True):
                master = join(weight[part], first[part])
                cut = {kind: state[part] for kind, state in states.items()}
                self._step(segment, task.divisor, grad[part], master, cut)
                for target, half in zip((weight[part], first[part]), split(master), strict=True):
                    target.copy_(half)
            return
        whole = weight if first is None else first
        assert whole is not None
        self._step(segment, task.divisor, grad, whole, states)
        if weight is not None and weight is not whole:
            weight.copy_(whole)

    def _step(
        self,
        segment: Alike,
        divisor: torch.Tensor | None,
        grad: torch.Tensor,
        master: torch.Tensor,
        states: Mapping[str, torch.Tensor],
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
            grad_scale=divisor,
        )
