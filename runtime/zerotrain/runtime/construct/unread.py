"""Tensors of files that are not read: a library that cuts, joins and casts them gets expressions.

Used only while a library loads a model (`models/from_pretrained.py`); parameters that come out of it become
`pending` ones. Works in every thread, as libraries load in several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from zerotrain.runtime.construct.expressions import (
    Cast,
    Cut,
    Expression,
    Held,
    Joined,
    Permutation,
    Reshaped,
    computed,
)

_HOST = torch.device("cpu")
_META = torch.device("meta")


class UnreadTensor(torch.Tensor):
    """A tensor of an expression: operations on it give further ones, and read only where they must."""

    expression: Expression

    @staticmethod
    def __new__(cls, expression: Expression) -> UnreadTensor:
        made: UnreadTensor = torch.Tensor._make_wrapper_subclass(
            cls, expression.shape, dtype=expression.dtype, device=_HOST
        )
        made.expression = expression
        return made

    def __init__(self, expression: Expression) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func.overloadpacket.__name__)
        if rule is not None:
            found = rule(*args, **kwargs)
            if isinstance(found, Expression):
                return cls(found)
            if found is not None:
                return [cls(each) for each in found]
        return _by_values(func, args, kwargs) if _needs_values(func) else _deferred(func, args, kwargs)


def _of(tensor: torch.Tensor) -> Expression:
    return tensor.expression if isinstance(tensor, UnreadTensor) else Held(tensor)


def _needs_values(func: Any) -> bool:
    returns = func._schema.returns
    return func._schema.is_mutable or not returns or not all("Tensor" in str(item.type) for item in returns)


def _deferred(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return unread results of any operation that only makes tensors."""
    in_args, in_kwargs = tree_map_only(torch.Tensor, _of, (args, kwargs))
    meta_args, meta_kwargs = tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
    if "device" in meta_kwargs:
        meta_kwargs = {**meta_kwargs, "device": _META}
    try:
        outputs = func(*meta_args, **meta_kwargs)
    except (NotImplementedError, RuntimeError):  # shapes that depend on values, or an error of the caller
        return _by_values(func, args, kwargs)
    made = iter(computed(func, in_args, in_kwargs, outputs))
    return tree_map_only(torch.Tensor, lambda _: UnreadTensor(next(made)), outputs)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=_META)


def _by_values(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run the operation now; what it writes is then held in memory."""
    unread = {id(each): each for each in tree_flatten((args, kwargs))[0] if isinstance(each, UnreadTensor)}
    values = {key: each.expression.whole() for key, each in unread.items()}
    real_args, real_kwargs = tree_map_only(UnreadTensor, lambda each: values[id(each)], (args, kwargs))
    result = func(*real_args, **real_kwargs)
    if func._schema.is_mutable:
        for key, each in unread.items():
            each.expression = Held(values[key])
        written = {id(value): unread[key] for key, value in values.items()}
        result = tree_map_only(torch.Tensor, lambda each: written.get(id(each), each), result)
    return result


# --- operations with an expression of their own; None: this call has none


def _same(tensor: torch.Tensor, *_: Any, **__: Any) -> Expression:
    return _of(tensor)


def _cast(tensor: torch.Tensor, *, dtype: Any = None, device: Any = None, **_: Any) -> Expression | None:
    if device is not None and torch.device(device).type != "cpu":
        return None
    inner = _of(tensor)
    return inner if dtype in (None, inner.dtype) else Cast(inner, dtype)


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> Expression | None:
    parts = [_of(each) for each in tensors]
    if len({part.dtype for part in parts}) > 1 or len({len(part.shape) for part in parts}) > 1:
        return None
    return Joined(parts, dim % len(parts[0].shape))


def _stacked(tensors: Sequence[torch.Tensor], dim: int = 0) -> Expression | None:
    parts = [_of(each) for each in tensors]
    if len({(part.dtype, part.shape) for part in parts}) > 1:
        return None
    dim %= len(parts[0].shape) + 1
    return Joined([Reshaped(each, (*each.shape[:dim], 1, *each.shape[dim:])) for each in parts], dim)


def _sliced(
    tensor: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Expression | None:
    if step != 1:
        return None
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    return Cut(_of(tensor), dim % tensor.dim(), first, max(0, last - first))


def _selected(tensor: torch.Tensor, dim: int, index: int) -> Expression:
    dim, index = dim % tensor.dim(), index % tensor.shape[dim]
    part = Cut(_of(tensor), dim, index, 1)
    return Reshaped(part, (*part.shape[:dim], *part.shape[dim + 1 :]))


def _split(tensor: torch.Tensor, sizes: int | Sequence[int], dim: int = 0) -> list[Expression]:
    dim, inner = dim % tensor.dim(), _of(tensor)
    if isinstance(sizes, int):
        total = inner.shape[dim]
        sizes = [min(sizes, total - first) for first in range(0, total, sizes)]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [Cut(inner, dim, first, length) for first, length in zip(starts, sizes, strict=True)]


def _unbound(tensor: torch.Tensor, dim: int = 0) -> list[Expression]:
    return [_selected(tensor, dim, index) for index in range(tensor.shape[dim])]


def _reshaped(tensor: torch.Tensor, sizes: Sequence[int] | torch.dtype, *_: Any) -> Expression | None:
    if isinstance(sizes, torch.dtype):  # other elements of the same bytes
        return None
    return Reshaped(_of(tensor), torch.empty(tensor.shape, device=_META).reshape(sizes).shape)


def _unsqueezed(tensor: torch.Tensor, dim: int) -> Expression:
    return Reshaped(_of(tensor), torch.empty(tensor.shape, device=_META).unsqueeze(dim).shape)


def _squeezed(tensor: torch.Tensor, *dim: Any) -> Expression:
    return Reshaped(_of(tensor), torch.empty(tensor.shape, device=_META).squeeze(*dim).shape)


def _permute(tensor: torch.Tensor, dims: Sequence[int]) -> Expression:
    return Permutation(_of(tensor), [dim % tensor.dim() for dim in dims])


def _transposed(tensor: torch.Tensor, dim0: int = 0, dim1: int = 1) -> Expression:
    dims = list(range(tensor.dim()))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return Permutation(_of(tensor), dims) if len(dims) > 1 else _of(tensor)


_RULES: Mapping[str, Callable[..., Expression | Sequence[Expression] | None]] = {
    **dict.fromkeys(("alias", "detach", "clone", "contiguous", "lift_fresh"), _same),
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _reshaped),
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    **dict.fromkeys(("transpose", "t"), _transposed),
    "_to_copy": _cast,
    "cat": _joined,
    "permute": _permute,
    "select": _selected,
    "slice": _sliced,
    "squeeze": _squeezed,
    "stack": _stacked,
    "unbind": _unbound,
    "unsqueeze": _unsqueezed,
}
"""Rules by the names of torch's operations."""
