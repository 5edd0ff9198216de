"""Adam, AdamW, Adagrad and Lion by the native kernels of csrc/cpu: the default on CPU, one pass over memory
instead of eight. On CUDA, Adam and AdamW by the kernels of csrc/cuda, with the same bits.

This is a separate module: everything else runs from a wheel without compiled code, where importing this one
raises ImportError. Called by `ZeroOptimizer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from zerotrain.runtime._native import Segment as NativeSegment
from zerotrain.runtime._native import UpdateTask, update_
from zerotrain.runtime.kernels.adam import AdamArrays, update
from zerotrain.runtime.kernels.device import Family, find
from zerotrain.runtime.offload.states import Block
from zerotrain.runtime.optim.device_scale import DeviceScale, on_host
from zerotrain.runtime.optim.fused import FusedAdamRule, FusedKernel
from zerotrain.runtime.optim.rules import AdagradRule, AdamRule, LionRule
from zerotrain.runtime.optim.update import Kernel, Segment, UnitUpdate, UpdateRule

if TYPE_CHECKING:
    from zerotrain.runtime._native import Kernels


class _NativeRule(UpdateRule):
    """The kernels' part of a rule of `rules.py`: the same bits on every processor, thread count and cut of
    the range, for masters in fp32, for those kept as bf16 weight and int16 remainder, and for bf16 weights
    that are their own masters, with states in fp32 or bf16. Tensors on CUDA are updated by the base class,
    except for Adam's (`NativeAdamRule`)."""

    __slots__ = ()

    @property
    def kernel_name(self) -> str:
        """Name of the native kernel."""
        raise AssertionError("every rule names its kernel")

    def kernel(self, update: UnitUpdate) -> Kernel:
        """Return the native kernel on CPU, else that of the base class."""
        return NativeKernel(self, update) if update.grads.device.type == "cpu" else super().kernel(update)

    def segment(self, segment: Segment) -> NativeSegment:
        """Return a segment in the form that the kernels take."""
        hyper = segment.hyper
        return NativeSegment(
            segment.start,
            segment.stop,
            lr=hyper.lr,
            beta1=hyper.betas[0],
            beta2=hyper.betas[1],
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            step=segment.step,
            bias_correction=getattr(self, "bias_correction", True),
            lr_decay=getattr(self, "lr_decay", 0.0),
            initial_sum=getattr(self, "start", 0.0),
        )


class NativeKernel(Kernel):
    """The update of a unit by a native kernel, for gradients and weights in fp32, bf16 and fp16. It leaves
    the gradients unchanged."""

    task: UpdateTask

    def __init__(self, rule: _NativeRule, unit: UnitUpdate) -> None:
        self._kinds = rule.kinds
        self.task = UpdateTask(
            rule.kernel_name,
            [rule.segment(segment) for segment in unit.segments],
            unit.grads,
            unit.weights,
            grad_scale=on_host(unit.grad_scale),
            weight_is_master=unit.writes_masters,
            bf16_states=unit.state_dtype is torch.bfloat16,
        )

    def run(self, block: Block) -> None:
        # A remainder in place of the master; neither where the weight is the master.
        first = block.remainder if block.weight is None or block.master is None else block.master
        update_(self.task, first, [block.by_kind[kind] for kind in self._kinds], start=block.start)


class CudaKernel(Kernel):
    """The update of a unit by our kernel on the device: one launch for up to 44 segments. It leaves the
    gradients unchanged."""

    def __init__(self, rule: NativeAdamRule, unit: UnitUpdate, kernels: Kernels) -> None:
        self._rule, self._unit, self._kernels = rule, unit, kernels
        self._segments = [rule.segment(segment) for segment in unit.segments]

    def run(self, block: Block) -> None:
        first, second = (block.by_kind[kind] for kind in self._rule.kinds)
        arrays = AdamArrays(
            segments=self._segments,
            start=block.start,
            master=block.master,
            remainder=block.remainder,
            first=first,
            second=second,
            grad=self._unit.grads[block.start : block.stop],
            weight=block.weight,
        )
        if not arrays.is_valid():
            FusedKernel(self._rule, self._unit).run(block)
            return
        scale = self._unit.grad_scale
        launch = partial(update, self._kernels, self._rule.kernel_name, [arrays])
        if isinstance(scale, DeviceScale):
            launch(factor=scale.factor, found_inf=scale.found_inf)
        else:
            launch(grad_scale=scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeAdamRule(_NativeRule, FusedAdamRule):
    """Adam and AdamW by the native kernel; on CUDA by ours where the device may use it, else by torch's fused
    kernel."""

    takes_device_scale: ClassVar[bool] = True

    def kernel(self, update: UnitUpdate) -> Kernel:
        """Return the kernel for the device of the gradients."""
        kernels = find(update.grads, Family.ADAM)
        return _NativeRule.kernel(self, update) if kernels is None else CudaKernel(self, update, kernels)

    @property
    def kernel_name(self) -> str:
        return "adamw" if self.decoupled else "adam"


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeAdagradRule(_NativeRule, AdagradRule):
    """Adagrad by the native kernel."""

    @property
    def kernel_name(self) -> str:
        return "adagrad"


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeLionRule(_NativeRule, LionRule):
    """Lion by the native kernel."""

    @property
    def kernel_name(self) -> str:
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
