"""Parameters whose values are not read yet, while a script prepares the model for `initialize`.

[Note: reading on use] A pending parameter looks like any parameter in host memory, but all its elements are
one NaN, and its class sees every use from Python. A use that only computes something (`norm`, `clone`, `p *
2`) gets the values for its duration. After any other use (writes, views, `numpy`) the parameter is an
ordinary one, the same object, with memory of its own. Reads are local: a rank that reads alone waits for
nobody. `detach` and `.data`, which `state_dict()` calls for its keys, give pending tensors of the same kind,
which stay the parameter's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from zerotrain.runtime.construct.expressions import Cast, Expression, Held, equal
from zerotrain.runtime.zero.placeholder import HARMLESS, nan_of

_expressions = WeakIdKeyDictionary()
"""Parameter or tensor -> expression, for all that are or were pending."""

_parameters = WeakIdKeyDictionary()
"""Result of `detach` -> its parameter."""


class _Pending:
    """Base of pending parameters and tensors: intercepts their uses."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in HARMLESS or func in _ALSO_HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            result = special(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return _use(func, args, kwargs)


class PendingParameter(_Pending, nn.Parameter):
    """Class of a parameter while it is pending; see [Note: reading on use]."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = pending(expression_of(self), requires_grad=self.requires_grad)
        return copied


class PendingTensor(_Pending, torch.Tensor):
    """A pending tensor that is no parameter: `detach` of one, or one in another dtype."""


def pending(expression: Expression, *, requires_grad: bool = True) -> nn.Parameter:
    """Return a new pending parameter."""
    made = nn.Parameter(_placeholder(expression), requires_grad=requires_grad)
    made.__class__ = PendingParameter
    _expressions[made] = expression
    return made


def is_pending(tensor: object) -> bool:
    """Return whether the values are not read yet."""
    return isinstance(tensor, _Pending)


def was_pending(parameter: nn.Parameter) -> bool:
    """Return whether the parameter is pending, or was."""
    return parameter in _expressions


def expression_of(tensor: torch.Tensor) -> Expression:
    """Return the expression of a parameter or tensor that is or was pending."""
    found: Expression = _expressions[tensor]
    return found


def forget_expression(parameter: nn.Parameter) -> None:
    """Drop the memory that a parameter was pending, once an engine has its values."""
    _expressions.pop(parameter, None)  # type: ignore[no-untyped-call]


def settle(parameter: nn.Parameter) -> None:
    """Read the values of a pending parameter, which is an ordinary one from then on."""
    if is_pending(parameter):
        _show(parameter, _values_of(parameter))


def postpone(parameter: nn.Parameter) -> None:
    """Make a parameter pending again, whose values are those of its expression."""
    parameter.__class__ = nn.Parameter
    parameter.data = _placeholder(expression_of(parameter))
    parameter.__class__ = PendingParameter


def make_pending(parameter: nn.Parameter, expression: Expression) -> None:
    """Make a parameter pending with this expression, whatever it was."""
    _expressions[parameter] = expression
    postpone(parameter)


def release(parameter: nn.Parameter, device: torch.device) -> None:
    """Make a parameter an ordinary one on the device, without values: one NaN."""
    parameter.__class__ = nn.Parameter
    parameter.data = _placeholder(parameter, device)


def is_unchanged(parameter: nn.Parameter) -> bool:
    """Return whether a parameter that was pending has the values of its expression."""
    expression = expression_of(parameter)
    return parameter.dtype == expression.dtype and equal(Held(parameter), expression)


def _placeholder(like: Expression | torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    return nan_of(like.dtype, device).expand(like.shape)


def _values_of(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):  # a tensor that is made in that mode could never be written
        return expression_of(tensor).whole()


def _show(tensor: torch.Tensor, values: torch.Tensor) -> None:
    tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
    with torch.no_grad():
        tensor.data = values


# --- uses


def _use(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a function on pending tensors, which have their values meanwhile, and afterwards if the result
    refers to them or the function wrote them."""
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = list({id(leaf): leaf for leaf in leaves if is_pending(leaf)}.values())
    owners = list({id(owner): owner for owner in map(_owner_of, tensors)}.values())
    read = [owner for owner in owners if is_pending(owner)]
    for owner in read:
        _show(owner, _values_of(owner))
    for tensor in tensors:
        if is_pending(tensor):
            _show(tensor, _owner_of(tensor).data)
    used = list({id(each): each for each in (*read, *tensors)}.values())
    versions = [each._version for each in used]
    stays = True
    try:
        result = func(*args, **kwargs)
        is_written = versions != [each._version for each in used]
        stays = is_written or func in _ADDRESSES or not _is_plain(result, owners)
        return result
    finally:
        if not stays:
            for each in used:
                if any(_owner_of(each) is owner for owner in read):
                    _hide(each)


def _owner_of(tensor: torch.Tensor) -> torch.Tensor:
    owner: torch.Tensor = _parameters.get(tensor, tensor)  # type: ignore[no-untyped-call]
    return owner


def _hide(tensor: torch.Tensor) -> None:
    tensor.data = _placeholder(tensor)
    tensor.__class__ = PendingParameter if isinstance(tensor, nn.Parameter) else PendingTensor


def _is_plain(result: Any, owners: Iterable[torch.Tensor]) -> bool:
    """Return whether a result has no reference to the memory of the owners: tensors of their own memory
    without a graph, and plain Python values."""
    memory = {owner.untyped_storage().data_ptr() for owner in owners}
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            if is_pending(leaf) or leaf.grad_fn is not None:
                return False
            if leaf.layout is not torch.strided or leaf.untyped_storage().data_ptr() in memory:
                return False
        elif not isinstance(leaf, (bool, int, float, complex, str, torch.dtype, torch.device, type(None))):
            return False
    return True


# --- functions that need no values


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    made = _placeholder(expression_of(_owner_of(tensor))).as_subclass(PendingTensor)
    _expressions[made] = expression_of(_owner_of(tensor))
    _parameters[made] = _owner_of(tensor)
    return made


def _set_data(tensor: torch.Tensor, values: torch.Tensor) -> Any:
    """Assign `p.data`: a pending value in another dtype is adopted, any other is the end of pending."""
    if not is_pending(tensor):
        return NotImplemented
    if is_pending(values) and values not in _parameters:
        _expressions[tensor] = expression_of(values)
        with torch._C.DisableTorchFunctionSubclass():
            _DATA.__set__(tensor, _placeholder(values))
        return None
    _show(tensor, values)
    _parameters.pop(tensor, None)  # type: ignore[no-untyped-call]
    return None


def _cast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return `tensor.to(...)` as a pending tensor where it changes the dtype alone."""
    if not is_pending(tensor) or (torch.is_grad_enabled() and tensor.requires_grad):
        return NotImplemented
    try:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    except (TypeError, RuntimeError):  # `to(other)` and copies
        return NotImplemented
    if dtype in (None, tensor.dtype) or (device is not None and device.type != "cpu"):
        return NotImplemented
    expression = Cast(expression_of(_owner_of(tensor)), dtype)
    made = _placeholder(expression).as_subclass(PendingTensor)
    _expressions[made] = expression
    return made


def _equal(first: torch.Tensor, second: torch.Tensor) -> Any:
    if not (is_pending(first) and is_pending(second)):
        return NotImplemented
    return equal(*(expression_of(_owner_of(each)) for each in (first, second)))


def _by_shape(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a tensor of the shape and dtype of another, without values of that."""

    def make(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_pending(tensor):
            return NotImplemented
        # Memory that nothing touches has no pages.
        return function(torch.empty(tensor.shape, dtype=tensor.dtype), *args, **kwargs)

    return make


def _strides(tensor: torch.Tensor, dim: int | None = None) -> Any:
    found = torch.empty(tensor.shape, device="meta").stride()
    return found if dim is None else found[dim]


def _to_dtype(dtype: torch.dtype) -> Callable[[torch.Tensor], Any]:
    return lambda tensor, **_: _cast(tensor, dtype)


_DATA: Any = vars(torch._C.TensorBase)["data"]
_ADDRESSES = {torch.Tensor.data_ptr, getattr(torch.Tensor, "const_data_ptr", None)}  # torch 2.11 lacks it
"""Functions whose result is an address of the values."""

_ALSO_HARMLESS = {torch._has_compatible_shallow_copy_type, torch.Tensor.is_inference, torch.is_inference}
_MAKING = (
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like),
    *(torch.randn_like, torch.Tensor.new_empty, torch.Tensor.new_zeros, torch.Tensor.new_ones),
    *(torch.Tensor.new_full, torch.Tensor.new_tensor),
)
_SPECIAL: dict[Any, Callable[..., Any]] = {
    **{function: _by_shape(function) for function in _MAKING},
    torch.Tensor.detach: _detached,
    _DATA.__get__: _detached,
    _DATA.__set__: _set_data,
    torch.Tensor.to: _cast,
    torch.Tensor.float: _to_dtype(torch.float32),
    torch.Tensor.half: _to_dtype(torch.float16),
    torch.Tensor.bfloat16: _to_dtype(torch.bfloat16),
    torch.equal: _equal,
    torch.Tensor.equal: _equal,
    torch.Tensor.is_contiguous: lambda *_, **__: True,
    torch.Tensor.storage_offset: lambda *_: 0,
    torch.Tensor.stride: _strides,
}
