"""Adam and AdamW on a GPU by torch's fused kernel, where ours is not used: one pass instead of ten.

Called through the rules of `rules.py` and `native.py`, which compute in another way on CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import torch

from zerotrain.runtime.optim.device_scale import DeviceScale
from zerotrain.runtime.optim.rules import AdamRule
from zerotrain.runtime.optim.update import Kernel, Segment, TorchKernel, UnitUpdate, UpdateRule
from zerotrain.runtime.zero.state import EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedAdamRule(AdamRule):
    """Adam and AdamW, equal to `AdamRule` up to rounding."""

    def kernel(self, update: UnitUpdate) -> Kernel:
        """Return the fused kernel on CUDA, else that of `AdamRule`."""
        if update.grads.device.type == "cuda":
            return FusedKernel(self, update)
        return AdamRule.kernel(self, update)


def fused_rule(rule: UpdateRule) -> UpdateRule:
    """Return the rule with the fused kernel where there is one."""
    if isinstance(rule, AdamRule):
        return FusedAdamRule(
            decoupled=rule.decoupled, bias_correction=rule.bias_correction, amsgrad=rule.amsgrad
        )
    return rule


class FusedKernel(TorchKernel):
    """The update of a unit by the fused kernel, for fp32 gradients, which are scaled in place."""

    rule: AdamRule

    def __init__(self, rule: AdamRule, unit: UnitUpdate) -> None:
        super().__init__(rule, unit)
        self._divisor: torch.Tensor | None = None
        """Divisor of the gradients; None = 1."""
        self._found_inf: torch.Tensor | None = None
        """Flag with which the kernel writes nothing."""
        scale = unit.grad_scale
        # Clipping gives a scale of 0 for gradients that are not finite: finite ones become 0, the others NaN.
        if isinstance(scale, DeviceScale):
            self._divisor = scale.factor.reciprocal().float()
            self._found_inf = None if scale.found_inf is None else scale.found_inf.float()
        elif scale != 1.0:
            inverse = 1.0 / scale if scale else inf
            self._divisor = torch.full((), inverse, dtype=torch.float32, device=unit.grads.device)

    def update(
        self, master: torch.Tensor, grad: torch.Tensor, states: Mapping[str, torch.Tensor], segment: Segment
    ) -> None:
        """Update masters and states of a tile in place."""
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
            grad_scale=self._divisor,
            found_inf=self._found_inf,
        )
