"""Adam, AdamW, Adagrad and Lion by the native kernels of csrc/cpu: the default on CPU, one pass over memory
instead of eight.

A module of its own: everything else runs from a wheel without compiled code, where importing this one raises
ImportError. Called by `ZeroOptimizer` and the state tiers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerotrain.runtime._native import Segment, UpdateTask, update_
from zerotrain.runtime.optim.fused import FusedAdamRule, FusedTask
from zerotrain.runtime.optim.rules import AdagradRule, AdamRule, Alike, Hyper, LionRule, UpdateRule
from zerotrain.runtime.zero.state import MASTER

REMAINDER = "remainder"


class _NativeRule:
    """What the kernels add to a rule of `rules.py`: the same bits on every processor, thread count and cut of
    the range, for masters in fp32 and for those kept as bf16 weight and int16 remainder. Tensors on CUDA go
    the base class's way, Adam's through `FusedAdamRule`."""

    __slots__ = ()
    kinds: tuple[str, ...]

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        raise AssertionError("every rule names its kernel")

    def _segment(self, start: int, stop: int, hyper: Hyper, step: int) -> Segment:
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

    def runs_on(self, device: torch.device) -> bool:
        """Whether `task` can be called for tensors there."""
        return device.type == "cpu"

    def task(
        self,
        segments: Sequence[Alike],
        *,
        grad: torch.Tensor,
        grad_scale: float,
        weight: torch.Tensor | None,
        names: Sequence[str],
    ) -> UpdateTask:
        """A step over the elements of `grad` (fp32, bf16 or fp16; kept) whose states are given later; in
        `names` the arrays that are. Hyperparameters are taken by value.

        `weight` (the same dtypes) gets the new values. With "remainder" among the names it is the upper half
        of the masters, and without "master", too, it is the fp32 master itself.
        """
        return UpdateTask(
            self.kernel,
            [self._segment(one.start, one.stop, one.hyper, one.step) for one in segments],
            grad,
            weight,
            grad_scale=grad_scale,
            weight_is_master=MASTER not in names and REMAINDER not in names,
        )

    def run(
        self,
        task: UpdateTask,
        master: torch.Tensor | None,
        states: Mapping[str, torch.Tensor],
        *,
        start: int = 0,
    ) -> None:
        """Do a part of a task, from element `start` on; `master` is fp32, or a remainder (int16), or None
        where the weight is it."""
        update_(task, master, [states[kind] for kind in self.kinds], start=start)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeAdamRule(_NativeRule, FusedAdamRule):
    """Adam and AdamW, on CUDA by torch's fused kernel."""

    def runs_on(self, device: torch.device) -> bool:
        """Whether `task` can be called for tensors there."""
        return _NativeRule.runs_on(self, device) or FusedAdamRule.runs_on(self, device)

    def task(
        self,
        segments: Sequence[Alike],
        *,
        grad: torch.Tensor,
        grad_scale: float,
        weight: torch.Tensor | None,
        names: Sequence[str],
    ) -> Any:
        """See `KernelRule`."""
        way = FusedAdamRule if FusedAdamRule.runs_on(self, grad.device) else _NativeRule
        return way.task(self, segments, grad=grad, grad_scale=grad_scale, weight=weight, names=names)

    def run(
        self,
        task: Any,
        master: torch.Tensor | None,
        states: Mapping[str, torch.Tensor],
        *,
        start: int = 0,
    ) -> None:
        """See `KernelRule`."""
        way = FusedAdamRule if isinstance(task, FusedTask) else _NativeRule
        way.run(self, task, master, states, start=start)

    @property
    def kernel(self) -> str:
        return "adamw" if self.decoupled else "adam"


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeAdagradRule(_NativeRule, AdagradRule):
    """Adagrad."""

    @property
    def kernel(self) -> str:
        return "adagrad"


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeLionRule(_NativeRule, LionRule):
    """Lion."""

    @property
    def kernel(self) -> str:
        return "lion"


def native_rule(rule: UpdateRule) -> UpdateRule:
    """The rule that does by a kernel what a rule of `rules.py` does, up to rounding; on CPU the rule itself
    where there is no kernel (SGD, amsgrad)."""
    if isinstance(rule, AdamRule) and not rule.amsgrad:
        return NativeAdamRule(decoupled=rule.decoupled, bias_correction=rule.bias_correction)
    if isinstance(rule, AdagradRule):
        return NativeAdagradRule(lr_decay=rule.lr_decay, start=rule.start)
    if isinstance(rule, LionRule):
        return NativeLionRule()
    return rule
