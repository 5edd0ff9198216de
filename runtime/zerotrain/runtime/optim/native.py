"""Adam, AdamW, Adagrad and Lion by the native kernels of csrc/cpu: the default on CPU, one pass over memory
instead of eight.

This is a separate module: everything else runs from a wheel without compiled code, where importing this one
raises ImportError. Called by `ZeroOptimizer` and the state tiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zerotrain.runtime._native import Segment, UpdateTask, update_
from zerotrain.runtime.optim.fused import FusedAdamRule
from zerotrain.runtime.optim.rules import AdagradRule, AdamRule, Hyper, Kernel, LionRule, UnitStep, UpdateRule
from zerotrain.runtime.zero.state import MASTER

REMAINDER = "remainder"


class _NativeRule:
    """The kernels' part of a rule of `rules.py`: the same bits on every processor, thread count and cut of
    the range, for masters in fp32 and for those kept as bf16 weight and int16 remainder. Tensors on CUDA are
    updated by the base class, Adam's by `FusedAdamRule`."""

    __slots__ = ()
    kinds: tuple[str, ...]

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        raise AssertionError("every rule names its kernel")

    def kernel_for(self, device: torch.device) -> Kernel | None:
        """Return the native kernel on CPU, else None."""
        return NativeKernel(self) if device.type == "cpu" else None

    def segment(self, start: int, stop: int, hyper: Hyper, step: int) -> Segment:
        return Segment(
            start,
            stop,
            lr=hyper.lr,
            beta1=hyper.betas[0],
            beta2=hyper.betas[1],
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            step=step,
            bias_correction=getattr(self, "bias_correction", True),
            lr_decay=getattr(self, "lr_decay", 0.0),
            initial_sum=getattr(self, "start", 0.0),
        )


@dataclass(frozen=True, slots=True)
class NativeKernel:
    """The native kernel of a rule: a `Kernel`. `task` takes gradients and weights in fp32, bf16 and fp16."""

    rule: _NativeRule

    def task(self, step: UnitStep) -> UpdateTask:
        """Return the task of a step, as `Kernel`; it leaves the gradients unchanged. With "remainder" among
        the names the weight is the upper half of the masters; with neither "remainder" nor "master", it is
        the fp32 master itself."""
        return UpdateTask(
            self.rule.kernel,
            [self.rule.segment(one.start, one.stop, one.hyper, one.step) for one in step.segments],
            step.grad,
            step.weight,
            grad_scale=step.grad_scale,
            weight_is_master=MASTER not in step.names and REMAINDER not in step.names,
        )

    def run(
        self, task: Any, master: torch.Tensor | None, states: Mapping[str, torch.Tensor], *, start: int = 0
    ) -> None:
        """Run a part of a task, as `Kernel`."""
        update_(task, master, [states[kind] for kind in self.rule.kinds], start=start)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeAdamRule(_NativeRule, FusedAdamRule):
    """Adam and AdamW by the native kernel, and on CUDA by torch's fused kernel."""

    def kernel_for(self, device: torch.device) -> Kernel | None:
        """Return the native kernel on CPU, the fused one on CUDA, else None."""
        return _NativeRule.kernel_for(self, device) or FusedAdamRule.kernel_for(self, device)

    @property
    def kernel(self) -> str:
        return "adamw" if self.decoupled else "adam"


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeAdagradRule(_NativeRule, AdagradRule):
    """Adagrad by the native kernel."""

    @property
    def kernel(self) -> str:
        return "adagrad"


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeLionRule(_NativeRule, LionRule):
    """Lion by the native kernel."""

    @property
    def kernel(self) -> str:
        return "lion"


def native_rule(rule: UpdateRule) -> UpdateRule:
    """Return the rule that computes a rule of `rules.py` by a native kernel, up to rounding; on CPU the rule
    itself where there is no kernel (SGD, amsgrad)."""
    if isinstance(rule, AdamRule) and not rule.amsgrad:
        return NativeAdamRule(decoupled=rule.decoupled, bias_correction=rule.bias_correction)
    if isinstance(rule, AdagradRule):
        return NativeAdagradRule(lr_decay=rule.lr_decay, start=rule.start)
    if isinstance(rule, LionRule):
        return NativeLionRule()
    return rule
