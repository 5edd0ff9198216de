"""Hooks through which the user's modules and autograd call the engine; each is one call of `ShardedModel`.

[Note: windows] A unit's weights are needed in backward from the first gradient that reaches an output of its
module until its last parameter gradient is computed. One `Window` per forward call finds both ends:

* The beginning is a tensor hook on every output through which a gradient can come back. (A module-level
  backward pre-hook does not fire for dicts and forbids `y = m(x); y += 1`.)
* The end is one autograd function around the module's inputs: its node is older than every node of the
  module, so autograd runs it after them. A module without inputs that need gradients ends with the whole
  backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zerotrain.runtime.zero.inputs import Inputs
from zerotrain.runtime.zero.transforms import (
    is_transformed,
    outside_transforms,
    reads_weights_later,
    unwrapped,
)
from zerotrain.runtime.zero.trees import replace_tensors
from zerotrain.runtime.zero.unit import Unit, UnitState

if TYPE_CHECKING:
    from zerotrain.runtime.zero.sharded_model import ShardedModel


COMPILER = "torch._dynamo"
"""Name of torch.compile's module."""
_CONVERTER = f"{COMPILER}.convert_frame"


class Boundary:
    """One module and the units whose life its forward and backward bound."""

    def __init__(self, module: nn.Module, name: str, units: list[Unit]) -> None:
        self.module = module
        self.name = name
        self.units = units
        self.calls: list[Window | None] = []
        """Windows of the forward calls that are running: several when a module calls itself. The window of a
        call that raised in compiled code stays until the root's next pass."""
        self.open_windows = 0
        self.expected_windows = 0
        """Number of forward calls whose backward has not ended yet."""
        self.num_ended = 0
        """Number of backward windows of this pass that have closed."""
        self.usual_ends: int | None = None
        """Value of `num_ended` at the end of the last pass; None before the first ends."""

    def is_complete(self, *, is_recompute: bool) -> bool:
        """Return whether, when a window closes, every gradient of the pass is computed, as far as can be
        known.

        The forward calls of reentrant checkpointing run without gradients, so the number of recomputations of
        a pass is known only from the last pass. In the first pass nothing is complete before the end.
        """
        if self.open_windows or self.expected_windows > 0:
            return False
        return not is_recompute or (self.usual_ends is not None and self.num_ended >= self.usual_ends)

    def end_pass(self) -> None:
        """Reset the counters at the end of a backward pass."""
        self.usual_ends, self.num_ended = self.num_ended, 0
        self.open_windows = self.expected_windows = 0


class Window:
    """The backward of one forward call of a boundary; see [Note: windows]."""

    __slots__ = ("boundary", "core", "inputs", "is_closed", "is_open", "is_recompute")

    def __init__(self, core: ShardedModel, boundary: Boundary, *, is_recompute: bool) -> None:
        self.core = core
        self.boundary = boundary
        self.inputs = Inputs()
        self.is_open = False
        self.is_closed = False
        self.is_recompute = is_recompute
        """Whether the window was made during a backward pass (activation checkpointing), and so may never be
        used."""

    def on_output_gradient(self, _gradient: torch.Tensor) -> None:
        """Open the window; tensor hook on an output."""
        if torch.is_grad_enabled():
            _refuse_second_order(self.boundary)
        self.core.open_window(self)


class CloseWindow(torch.autograd.Function):
    """Identity on a module's inputs whose backward is the end of the module's backward."""

    @staticmethod
    def forward(ctx: Any, window: Window, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.window = window
        # Aliases that are not autograd views, because a module may still modify its inputs in place.
        return tuple(tensor.detach() for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.window.core.close_window(ctx.window)
        return (None, *gradients)

    @staticmethod
    def jvp(_ctx: Any, _window: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tangents


_close_after: Callable[..., tuple[torch.Tensor, ...]] = CloseWindow.apply


class _Untraced(partial[Any]):
    """Method of an object that torch.compile does not trace; whoever copies it copies the object.

    `torch.compiler.disable` makes a function even of a bound method, and a copy of the model would share it.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.args[0].__reduce_ex__(protocol)


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a bound method as a hook at which torch.compile breaks the graph.

    If the compiler is not loaded, nothing was compiled, and loading it would cost seconds.
    """
    compiler = sys.modules.get(COMPILER)
    if compiler is None:
        return hook
    assert isinstance(hook, MethodType)
    return _Untraced(compiler.disable(hook.__func__), hook.__self__)


class BoundaryHooks:
    """Forward hooks of one boundary."""

    def __init__(self, core: ShardedModel, boundary: Boundary, *, is_root: bool) -> None:
        self._core = core
        self._boundary = boundary
        self._is_root = is_root
        self._handled: list[BaseException | None] = []
        """Errors that the program handled when the running calls began, one for each call."""

    def attach(self) -> list[RemovableHandle]:
        """Register the hooks: the first pre-forward and the last forward hook of those that exist now."""
        module = self._boundary.module
        return [
            module.register_forward_pre_hook(untraced(self._before), prepend=True, with_kwargs=True),
            module.register_forward_hook(untraced(self._after), always_call=True),
        ]

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "an engine drives this model, so it cannot be copied or pickled; take its state dict, on every "
            "rank: "
            "`with zerotrain.runtime.full_parameters(model): copy.deepcopy(model.state_dict())`"
        )

    def _before(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._handled.append(sys.exc_info()[1])
        if transformed := is_transformed() is not None:
            _refuse_transforms(self._boundary)
        with outside_transforms():
            window = self._core.before_forward(self._boundary, is_root=self._is_root)
        if self._core.passes.entry is self._boundary:
            args, kwargs = self._core.callbacks.on_entry(self._boundary, args, kwargs)
        if window is None:
            return args, kwargs
        return window.inputs.replace(args, kwargs, None if transformed else partial(_close_after, window))

    def _after(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        handled = self._handled.pop() if self._handled else None
        has_raised = sys.exc_info()[1] is not handled
        output = self._keep_off_weights(output)
        window = self._boundary.calls.pop() if self._boundary.calls else None
        num_hooked = 0
        if window is not None:
            is_sharded = any(unit.placement.params_sharded for unit in self._boundary.units)
            output, computed = window.inputs.finish(output, self._boundary.module, with_stored=is_sharded)
            for tensor in computed:
                tensor.register_hook(window.on_output_gradient)  # type: ignore[no-untyped-call]
                num_hooked += 1
        with outside_transforms():
            self._core.after_forward(self._boundary, window if num_hooked else None, has_raised=has_raised)
        return output

    def _keep_off_weights(self, output: Any) -> Any:
        """Copy outputs that are views of weights, because they outlive the unit's live window."""
        units = [unit for unit in self._boundary.units if unit.placement.params_sharded]
        if not units:
            return output
        return replace_tensors(
            output,
            lambda tensor: any(aliases(tensor, unit) for unit in units),
            lambda tensors: [tensor.clone() for tensor in tensors],
        )


def has_compiled_code() -> bool:
    """Return whether torch.compile has compiled anything in this process."""
    converter = sys.modules.get(_CONVERTER)
    return getattr(converter, "FRAME_COUNTER", 0) > 0


def _refuse_second_order(boundary: Boundary) -> None:
    """Raise RuntimeError for `create_graph` at stage 3, where the graph would read freed weights later."""
    sharded = [unit.name for unit in boundary.units if unit.placement.params_sharded]
    if sharded:
        raise RuntimeError(
            f"create_graph=True is not possible at stage 3: the second backward would read unit "
            f"{sharded[0]!r} after it was freed; take stage 2, where weights stay whole"
        )


def _refuse_transforms(boundary: Boundary) -> None:
    """Raise RuntimeError for `torch.func.grad` and its kind at stage 3, where what the transform keeps of the
    weights is freed when the module's forward ends."""
    sharded = [
        unit.name
        for unit in boundary.units
        if unit.placement.params_sharded and unit.state is not UnitState.HELD
    ]
    if sharded and reads_weights_later():
        raise RuntimeError(
            "torch.func.grad, vjp, jacrev and hessian, and jvp over parameters, are not possible at stage 3: "
            f"they would read unit {sharded[0]!r} after it was freed; take stage 2, where weights stay "
            "whole, or run them within full_parameters(model). vmap, and jvp over inputs, work"
        )


def aliases(tensor: torch.Tensor, unit: Unit) -> bool:
    """Return whether the tensor shares memory with the unit's whole weights."""
    tensor = unwrapped(tensor)
    return bool(tensor.untyped_storage()._cdata == unit.full.tensor.untyped_storage()._cdata)


def in_graph_task() -> bool:
    """Return whether autograd is running backward, in which case a forward call is a recomputation."""
    return torch._C._current_graph_task_id() != -1
