"""Uses of partitioned parameters outside of the calls of their modules: `hidden @ model.head.weight.t()`.

Within a call of the model the whole unit is shown until the end of the pass (`ShardedModel.open_for_use`).
Elsewhere the end of the pass is unknown, so the unit is *lent*: it is whole, while every use still goes
through this module. A use shows its parameters for one operation and hooks the results, so that backward
finds the weights again wherever they are by then. Results that are views of the weights are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerotrain.runtime.zero.callers import Caller, caller_in
from zerotrain.runtime.zero.hooks import Boundary, Window, aliases, in_graph_task
from zerotrain.runtime.zero.placeholder import Use
from zerotrain.runtime.zero.trees import replace_tensors, tensors_with_grad
from zerotrain.runtime.zero.unit import Unit, UnitState

if TYPE_CHECKING:
    from zerotrain.runtime.zero.sharded_model import ShardedModel


class DirectUses:
    """Uses of one model's parameters."""

    def __init__(self, core: ShardedModel) -> None:
        self._core = core
        self._boundaries: dict[Unit, Boundary] = {}
        self._are_common = False
        """Whether every rank runs the code that runs now."""

    @contextmanager
    def common(self) -> Iterator[None]:
        """Allow, for a block that every rank runs, what computes a tensor from parameters alone, also without
        gradients."""
        before, self._are_common = self._are_common, True
        try:
            yield
        finally:
            self._are_common = before

    def forget(self) -> None:
        """Forget the units, because they were replaced."""
        self._boundaries.clear()

    def allows(self, use: Use) -> bool:
        """Return whether every rank can be expected to make this use, so that waiting for all is safe.

        It can in code of the model, in the computation of the loss (with gradients on, between the first call
        of a step and its backward pass), and if an evaluation continues with a module's result. A script that
        only reads a weight does not qualify: often only one rank does that.
        """
        if in_graph_task():
            return True
        passes, computes = self._core.passes, _computes(use)
        if self._are_common and computes:
            return True
        if torch.is_grad_enabled():
            if computes and passes.expects_backward:
                return True
        elif computes and passes.is_continued() and use.has_data:
            return True
        caller = caller_in(self._core.model)
        return caller is Caller.FORWARD or (computes and caller is Caller.METHOD)

    def lend(self, parameter: nn.Parameter, use: Use) -> bool:
        """Make the parameter's unit whole, if the use is allowed; return whether it is. The first use begins
        a pass."""
        if not self.allows(use):
            return False
        if not in_graph_task():
            self._core.passes.begin_use()  # may replace units
        unit = unit_of(self._core, parameter)
        unit.lend()
        if torch.is_grad_enabled():
            unit.is_wide = True
        return True

    def run(self, parameters: Sequence[nn.Parameter], use: Callable[[], Any]) -> Any:
        """Run one operation on parameters that are lent."""
        pairs = [(parameter, unit_of(self._core, parameter)) for parameter in parameters]
        for parameter, unit in pairs:
            unit.views.show(parameter)
        try:
            result = use()
        finally:
            for parameter, unit in pairs:
                if unit.state is UnitState.LENT:
                    unit.views.hide(parameter)
        if any(result is parameter for parameter in parameters):
            return result
        owners = list(dict.fromkeys(unit for _, unit in pairs))
        result = replace_tensors(
            result,
            lambda tensor: any(aliases(tensor, unit) for unit in owners),
            lambda tensors: [tensor.clone() for tensor in tensors],
        )
        self._hook(result, owners)
        return result

    def _hook(self, result: Any, units: Sequence[Unit]) -> None:
        for unit in units:
            boundary = self._boundaries.get(unit)
            if boundary is None:
                boundary = Boundary(self._core.model, unit.name, [unit])
                self._boundaries[unit] = boundary
            window = Window(self._core, boundary, is_recompute=False)
            for tensor in tensors_with_grad(result):
                if not tensor.is_leaf:
                    tensor.register_hook(window.on_output_gradient)  # type: ignore[no-untyped-call]


def show_for_pass(unit: Unit) -> None:
    """Make a unit that is used outside of its module whole until the current pass ends."""
    unit.is_wide = True
    unit.require(UnitState.BACKWARD if in_graph_task() else UnitState.FORWARD)


def unit_of(core: ShardedModel, parameter: nn.Parameter) -> Unit:
    """Return the unit that holds a parameter of this model."""
    return next(unit for unit in core.units if any(parameter is member for member in unit.parameters))


def _computes(use: Use) -> bool:
    """Return whether the use computes a tensor from the values, and neither writes nor leaves torch."""
    is_in_place = use.name.endswith("_") and not use.name.endswith("__")
    return use.function not in _LEAVING and not is_in_place


_LEAVING = {
    vars(torch._C.TensorBase)["data"].__get__,
    vars(torch._C.TensorBase)["data"].__set__,
    torch.Tensor.detach,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.__array__,
    torch.Tensor.__setitem__,
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
    torch.Tensor.__format__,
    torch.Tensor.__repr__,
    torch.Tensor.__deepcopy__,
    torch.Tensor.__dlpack__,
    torch.autograd.grad,
}
