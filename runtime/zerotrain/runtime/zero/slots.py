"""Contents of `p.grad`: a view of the buffer that autograd writes into, or a `ShardedGradient`.

[Note: gradients that are elsewhere] After a backward pass most gradients are not in a tensor of the
parameter's shape: stages 2 and 3 have sent them to their owners, stages 0 and 1 hold sums of micro-batches in
fp32. If `p.grad` were None, code that clips, logs or drops gradients would take that for "no gradient" and
silently do nothing. So `p.grad` is then a tensor without memory that refuses reads and says what to call
instead. Three uses of it mean the same at every stage, and work: setting it to None and `zero_()` drop the
parameter's gradient, and multiplying it by a number scales it. Parameters keep their class.

Owned by `UnitGradients`; docs/adr/0050-gradients-of-others-code.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from zerotrain.runtime.zero.placeholder import found_in
from zerotrain.runtime.zero.unit import Unit

aten: Any = torch.ops.aten


class GradientSharded(RuntimeError):
    """A gradient was used through `p.grad` while the engine keeps it elsewhere."""

    def __init__(self, fqn: str, use: str) -> None:
        self.fqn = fqn
        super().__init__(
            f"the gradient of parameter {fqn!r} cannot be used through p.grad (in {use}): the engine keeps "
            "it as parts on the ranks, or before their average. Read it on every rank with "
            "zerotrain.runtime.get_full_grad(parameter), between backward and step or in a hook of "
            "engine.register_step_hook(hook, before_update=True), and write it with set_full_grad; "
            "torch.nn.utils.clip_grad_norm_, clip_grad_value_ and optimizer.clip_grad_norm_ bound it, "
            "zero_grad() drops it"
        )


class ShardedGradient(torch.Tensor):
    """Placeholder in `p.grad` with the parameter's shape, dtype and device.

    See [Note: gradients that are elsewhere].
    """

    slots: weakref.ref[GradientSlots]
    place: int
    """Index of the parameter in its unit."""
    fqn: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(slots: GradientSlots, index: int) -> ShardedGradient:
        """Make the placeholder for one parameter of a unit. It refers to `slots` weakly, because a reference
        cycle through `p.grad` is never freed."""
        parameter = slots.unit.parameters[index]
        with torch._C.DisableTorchFunctionSubclass():
            made: ShardedGradient = torch.Tensor._make_wrapper_subclass(
                ShardedGradient, parameter.shape, dtype=parameter.dtype, device=parameter.device
            )
        made.slots, made.place = weakref.ref(slots), index
        made.fqn = slots.unit.layout.segments[index].fqn
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's annotation is that of an instance's method
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        use: Callable[..., Any] = _USES.get(func, _refuse)
        return use(func, *args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"ShardedGradient({self.fqn!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            "kept by the engine)"
        )

    def data_ptr(self) -> NoReturn:
        """Refuse an address, because there is no memory; torch would return 0."""
        raise GradientSharded(self.fqn, "data_ptr")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse an array; torch's error names no way out."""
        raise GradientSharded(self.fqn, "numpy")

    def tolist(self) -> NoReturn:
        """Refuse a list; torch's error names no way out."""
        raise GradientSharded(self.fqn, "tolist")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise GradientSharded(self.fqn, "__array__")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise GradientSharded(self.fqn, "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise GradientSharded(self.fqn, "pickle")


class GradientSlots:
    """The `p.grad` slots of one unit's parameters, and what the engine last put there."""

    def __init__(self, unit: Unit, parts_of: Callable[[int], list[torch.Tensor]]) -> None:
        """`parts_of` returns this rank's parts of one parameter's gradient."""
        self.unit = unit
        self._parts_of = parts_of
        self.shown: Sequence[torch.Tensor] | None = None
        """Tensors that the engine last put into the slots; None = None in every slot."""
        self._handles: list[torch.Tensor] = []
        self._added: set[int] = set()
        """Indices of slots in which autograd replaced a `ShardedGradient` by a gradient."""

    def fill(self, tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[tuple[int, torch.Tensor]]]:
        """Put tensors into the slots, and return what other code changed there.

        Returns `(indices of gradients that were dropped or replaced, (index, tensor) of those found there
        that are not the engine's)`.
        """
        before, self.shown = self.shown, tensors
        lost: list[int] = []
        strays: list[tuple[int, torch.Tensor]] = []
        with torch._C.DisableTorchFunctionSubclass():
            for index, (parameter, tensor) in enumerate(zip(self.unit.parameters, tensors, strict=True)):
                found = parameter.grad
                if found is tensor:
                    continue
                parameter.grad = tensor
                if found is (None if before is None else before[index]):
                    continue
                if before is not None and (found is None or index not in self._added):
                    lost.append(index)
                if found is not None:
                    strays.append((index, found))
        self._added.clear()
        return lost, strays

    def hide(self) -> None:
        """Put placeholders into the slots, for gradients that are elsewhere."""
        if not self._handles:
            self._handles = [ShardedGradient.of(self, index) for index in range(len(self.unit.parameters))]
        self.shown = self._handles
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, handle in zip(self.unit.parameters, self._handles, strict=True):
                parameter.grad = handle

    def empty(self) -> None:
        """Set every `p.grad` to None."""
        self.shown = None
        self._added.clear()
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self.unit.parameters:
                parameter.grad = None

    @property
    def are_hidden(self) -> bool:
        """Whether `ShardedGradient`s are in the slots."""
        return self.shown is not None and self.shown is self._handles

    def found(self) -> list[torch.Tensor | None]:
        """Return the current contents of the slots."""
        with torch._C.DisableTorchFunctionSubclass():
            return [parameter.grad for parameter in self.unit.parameters]

    def have_strays(self) -> bool:
        """Return whether a slot holds a tensor that the engine did not put there, but autograd or a script
        did."""
        found = self.found()
        if self.shown is None:
            return any(grad is not None for grad in found)
        pairs = zip(found, self.shown, strict=True)
        return any(grad is not None and grad is not shown for grad, shown in pairs)

    def receive(self, index: int, gradient: torch.Tensor) -> None:
        """Store a gradient that autograd adds to one that is elsewhere: put the summand into the slot, as
        autograd itself does with an empty slot."""
        self._added.add(index)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self.unit.parameters[index].grad = gradient.detach().clone()

    @torch.no_grad()
    def change(self, index: int, operation: Callable[[torch.Tensor], Any]) -> None:
        """Apply an in-place operation to all of this rank's parts of one parameter's gradient."""
        for part in self._parts_of(index):
            operation(part)


def _slots_of(handle: ShardedGradient, func: Any) -> GradientSlots:
    """Return the slots of a placeholder. Raises GradientSharded for one of an earlier step."""
    slots = handle.slots()
    if slots is None or not slots.are_hidden:
        raise GradientSharded(handle.fqn, f"{_name(func)}, after the step that it belongs to")
    return slots


def _name(func: Any) -> str:
    name: str = func.overloadpacket.__name__
    return name


def _refuse(func: Any, *args: Any, **kwargs: Any) -> NoReturn:
    handle = next(found_in((args, kwargs), ShardedGradient))  # torch dispatches here only because of one
    raise GradientSharded(handle.fqn, _name(func))


def _alias(func: Any, handle: ShardedGradient, **_: Any) -> ShardedGradient:
    """Implements `p.grad.detach()` and `p.grad.data`."""
    return ShardedGradient.of(_slots_of(handle, func), handle.place)


def _same(func: Any, handle: ShardedGradient) -> ShardedGradient:
    return handle


def _zero(func: Any, handle: ShardedGradient) -> ShardedGradient:
    _slots_of(handle, func).change(handle.place, torch.Tensor.zero_)
    return handle


def _scale(func: Any, handle: Any, factor: Any, **kwargs: Any) -> ShardedGradient:
    number = _number(factor)
    if not isinstance(handle, ShardedGradient) or number is None or kwargs:
        _refuse(func, handle, factor)
    is_division = func.overloadpacket in (aten.div_, aten._foreach_div_)
    operation = torch.Tensor.div_ if is_division else torch.Tensor.mul_
    _slots_of(handle, func).change(handle.place, lambda part: operation(part, number))
    return handle


def _number(value: Any) -> float | None:
    if isinstance(value, ShardedGradient):
        return None
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value)


def _zero_all(func: Any, handles: Sequence[Any]) -> None:
    for handle in handles:
        if isinstance(handle, ShardedGradient):
            _zero(func, handle)
        else:
            handle.zero_()


def _scale_all(func: Any, handles: Sequence[Any], factors: Any) -> None:
    each = factors if isinstance(factors, (list, tuple)) else [factors] * len(handles)
    for handle, factor in zip(handles, each, strict=True):
        if isinstance(handle, ShardedGradient):
            _scale(func, handle, factor)
        else:
            func.overloadpacket([handle], [factor])


def _add_in_place(func: Any, handle: Any, other: Any, **kwargs: Any) -> Any:
    """Accept a gradient that autograd adds after the others were sent."""
    if not isinstance(handle, ShardedGradient) or torch._C._current_graph_task_id() == -1 or kwargs:
        _refuse(func, handle, other)
    _slots_of(handle, func).receive(handle.place, other)
    return handle


def _add(func: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """Accept such a gradient with create_graph: autograd puts the returned tensor into `p.grad`."""
    handle, other = (left, right) if isinstance(left, ShardedGradient) else (right, left)
    if isinstance(other, ShardedGradient) or torch._C._current_graph_task_id() == -1 or kwargs:
        _refuse(func, left, right)
    _slots_of(handle, func).receive(handle.place, other)
    return other.clone()


_USES: Mapping[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.detach_.default: _same,
    aten.zero_.default: _zero,
    aten.mul_.Tensor: _scale,
    aten.mul_.Scalar: _scale,
    aten.div_.Tensor: _scale,
    aten.div_.Scalar: _scale,
    aten._foreach_zero_.default: _zero_all,
    aten._foreach_mul_.Scalar: _scale_all,
    aten._foreach_mul_.Tensor: _scale_all,
    aten._foreach_mul_.ScalarList: _scale_all,
    aten._foreach_div_.Scalar: _scale_all,
    aten._foreach_div_.Tensor: _scale_all,
    aten._foreach_div_.ScalarList: _scale_all,
    aten.add_.Tensor: _add_in_place,
    aten.add.Tensor: _add,
}
