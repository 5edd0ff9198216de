"""The update rules. Each works in place on equal 1-D fp32 slices, in tiles, with the arithmetic of
torch.optim.

The order of operations is torch's single-tensor order, so that the result equals torch's bit for bit; a tile
only bounds the temporaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zerotrain.contract.config import ConfigError, OptimizerConfig
from zerotrain.runtime.optim.groups import Hyper
from zerotrain.runtime.optim.update import UpdateRule
from zerotrain.runtime.zero.state import EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, MOMENTUM, SUM


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamRule(UpdateRule):
    """Adam (https://arxiv.org/abs/1412.6980), or AdamW (https://arxiv.org/abs/1711.05101) when decoupled."""

    decoupled: bool = True
    bias_correction: bool = True
    amsgrad: bool = False
    """Whether to divide by the largest second moment so far (https://openreview.net/forum?id=ryQu7f-RZ)."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the moments."""
        return (EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ) if self.amsgrad else (EXP_AVG, EXP_AVG_SQ)

    def update(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        hyper: Hyper,
        step: int,
    ) -> None:
        beta1, beta2 = hyper.betas
        exp_avg, exp_avg_sq = states[EXP_AVG], states[EXP_AVG_SQ]
        if hyper.weight_decay and self.decoupled:
            param.mul_(1 - hyper.lr * hyper.weight_decay)
        elif hyper.weight_decay:
            grad = grad.add(param, alpha=hyper.weight_decay)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        correction1 = 1 - beta1**step if self.bias_correction else 1.0
        correction2 = 1 - beta2**step if self.bias_correction else 1.0
        if self.amsgrad:
            largest = states[MAX_EXP_AVG_SQ]
            exp_avg_sq = torch.maximum(largest, exp_avg_sq, out=largest)
        denominator = (exp_avg_sq.sqrt() / correction2**0.5).add_(hyper.eps)
        param.addcdiv_(exp_avg, denominator, value=-(hyper.lr / correction1))


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDRule(UpdateRule):
    """Gradient descent, with torch's momentum."""

    dampening: float = 0.0
    nesterov: bool = False
    has_momentum: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Name of the momentum, if it is on: only then it costs a stream."""
        return (MOMENTUM,) if self.has_momentum else ()

    def update(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        hyper: Hyper,
        step: int,
    ) -> None:
        if hyper.weight_decay:
            grad = grad.add(param, alpha=hyper.weight_decay)
        if self.has_momentum:
            buffer = states[MOMENTUM]
            if step == 1:
                buffer.copy_(grad)  # torch does not dampen the first gradient
            else:
                buffer.mul_(hyper.momentum).add_(grad, alpha=1 - self.dampening)
            grad = grad.add(buffer, alpha=hyper.momentum) if self.nesterov else buffer
        param.add_(grad, alpha=-hyper.lr)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdagradRule(UpdateRule):
    """Adagrad (https://jmlr.org/papers/v12/duchi11a.html)."""

    lr_decay: float = 0.0
    start: float = 0.0
    """Initial value of the sum of squares."""
    kinds: tuple[str, ...] = (SUM,)

    def update(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        hyper: Hyper,
        step: int,
    ) -> None:
        if hyper.weight_decay:
            grad = grad.add(param, alpha=hyper.weight_decay)
        total = states[SUM]
        if step == 1 and self.start:
            total.fill_(self.start)
        total.addcmul_(grad, grad)
        rate = hyper.lr / (1 + (step - 1) * self.lr_decay)
        param.addcdiv_(grad, total.sqrt().add_(hyper.eps), value=-rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class LionRule(UpdateRule):
    """Lion (https://arxiv.org/abs/2302.06675): the sign of a mixed momentum, with decoupled weight decay."""

    kinds: tuple[str, ...] = (EXP_AVG,)

    def update(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        hyper: Hyper,
        step: int,
    ) -> None:
        beta1, beta2 = hyper.betas
        momentum = states[EXP_AVG]
        direction = momentum.mul(beta1).add_(grad, alpha=1 - beta1).sign_()
        if hyper.weight_decay:
            param.mul_(1 - hyper.lr * hyper.weight_decay)
        param.add_(direction, alpha=-hyper.lr)
        momentum.mul_(beta2).add_(grad, alpha=1 - beta2)


def rule_of(config: OptimizerConfig) -> UpdateRule:
    """Return the element-wise rule that a configuration names, with torch's arithmetic. Raises ConfigError
    for one that does not exist here."""
    params = config.params
    if config.type in ("Adam", "AdamW"):
        return AdamRule(
            decoupled=config.decoupled_weight_decay,
            bias_correction=config.bias_correction,
            amsgrad=bool(params.get("amsgrad")),
        )
    if config.type == "SGD":
        return SGDRule(
            dampening=float(params.get("dampening", 0.0)),
            nesterov=bool(params.get("nesterov", False)),
            has_momentum=bool(config.momentum),
        )
    if config.type == "Adagrad":
        return AdagradRule(
            lr_decay=float(params.get("lr_decay", 0.0)),
            start=float(params.get("initial_accumulator_value", 0.0)),
        )
    if config.type == "Lion":
        return LionRule()
    raise ConfigError(
        "optimizer.type", "must be an optimizer that this version runs", config.type, 'Set it to "AdamW".'
    )
