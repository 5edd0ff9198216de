"""The update rule that uses the native kernel of csrc/cpu (`optimizer.type: DeepSpeedCPUAdam`).

A module of its own: it is imported only when a configuration asks for it, so that everything else runs from a
wheel without compiled code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zerotrain.runtime._native import adamw_
from zerotrain.runtime.optim.rules import AdamRule, Hyper
from zerotrain.runtime.zero.state import EXP_AVG, EXP_AVG_SQ


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeAdamRule(AdamRule):
    """Adam by one pass over memory instead of eight; tensors on CUDA go the base class's way."""

    def update(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        hyper: Hyper,
        step: int,
    ) -> None:
        if param.device.type != "cpu" or not self.bias_correction:
            AdamRule.update(self, param, grad, states, hyper, step)
            return
        adamw_(
            param,
            states[EXP_AVG],
            states[EXP_AVG_SQ],
            grad,
            None,
            lr=hyper.lr,
            beta1=hyper.betas[0],
            beta2=hyper.betas[1],
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            step=step,
            decoupled=self.decoupled,
            threads=torch.get_num_threads(),
        )
