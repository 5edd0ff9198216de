"""Placeholder of a parameter whose values are on other ranks: the same object, in a class that refuses reads.

[Note: one object, two classes] A sharded parameter keeps its identity, because optimizers, tied modules and
the user's own lists refer to it. So hiding it changes its class, and `__torch_function__` then sees every use
from Python. The few C paths that do not call `__torch_function__` (`torch.tensor(p)`, DLPack capsules) find a
tensor of the right shape, dtype and device whose elements are all one NaN: the result is visibly wrong, and
never an invalid address.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from zerotrain.runtime.zero.labels import ShardedLabels


class ParameterSharded(RuntimeError):
    """A parameter was used while its values are partitioned over the ranks."""

    def __init__(self, fqn: str, use: str) -> None:
        self.fqn = fqn
        super().__init__(
            f"parameter {fqn!r} is partitioned over the ranks and cannot be used here (in {use}). Its values "
            "are whole while code of the model runs (a module, or a method of one), and for what makes the "
            "loss between the first forward call and its backward pass; elsewhere, on every rank: `with "
            "zerotrain.runtime.full_parameters(model): ...`, around forward and backward where gradients are "
            "to come through"
        )


class Use(NamedTuple):
    """Call of a torch function with hidden parameters."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the function."""
        return getattr(self.function, "__name__", str(self.function))

    @property
    def has_data(self) -> bool:
        """Whether the call has a tensor argument that is not a parameter."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return any(isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter) for leaf in leaves)

    def run(self) -> Any:
        """Call the function."""
        return self.function(*self.args, **self.kwargs)


class Owner(Protocol):
    """Object that hides the parameter."""

    def settle_for_use(self, parameter: nn.Parameter) -> bool:
        """Show a parameter that is hidden only during its update, if that is allowed now; return whether it
        was."""
        ...

    def open_for_use(self, parameter: nn.Parameter, use: Use) -> bool:
        """Make the parameter whole if that is allowed now; return whether it was. If it is still hidden then,
        it is lent: `uses` runs the operation."""
        ...

    @property
    def uses(self) -> Lender:
        """Runs functions on parameters that are lent."""
        ...


class Lender(Protocol):
    """Object that shows parameters for one operation."""

    def run(self, parameters: Sequence[nn.Parameter], use: Callable[[], Any]) -> Any:
        """Return the result of `use()`, called while these parameters are whole."""
        ...


_owners = WeakIdKeyDictionary()
"""Parameter -> (weak reference to its owner, fqn). Weak, as owners hold their parameters, and hooks or an
engine hold the owner."""


class ShardedParameter(ShardedLabels, nn.Parameter):
    """Class of a parameter while it is hidden; see [Note: one object, two classes]."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.Tensor.__repr__:
            owner = owner_of(args[0])
            if owner is None or not owner.settle_for_use(args[0]):
                return _text(fqn_of(args[0]), args[0])
        use = Use(func, args, kwargs)
        hidden: list[nn.Parameter] = [*found_in((args, kwargs), ShardedParameter)]
        for parameter in hidden:
            if not isinstance(parameter, ShardedParameter):
                continue  # shown together with another parameter of its unit
            owner, fqn = owner_of(parameter), fqn_of(parameter)
            if owner is None or not owner.open_for_use(parameter, use):
                if func is torch.Tensor.detach:
                    return ShardedValues.of(parameter)
                raise ParameterSharded(fqn, use.name)
        return _run_on_lent(use.run, [each for each in hidden if isinstance(each, ShardedParameter)])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _ = self.data  # raises unless it can be shown; then it has its original class again
        return copy.deepcopy(self, memo)


class ShardedValues(torch.Tensor):
    """Result of `detach` on a sharded parameter: shape and dtype can be read, values cannot.

    `state_dict()` of any part of the model calls `detach`, and libraries call that only for the keys.
    """

    fqn: str

    @classmethod
    def of(cls, parameter: nn.Parameter) -> ShardedValues:
        with torch._C.DisableTorchFunctionSubclass():
            values = parameter.detach().as_subclass(cls)
        values.fqn = fqn_of(parameter)
        return values

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.detach:
            return args[0]
        if func is torch.Tensor.__repr__:
            return _text(args[0].fqn, args[0])
        if func in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        names = [each.fqn for each in found_in((args, kwargs or {}), cls)]
        raise ParameterSharded(names[0] if names else "?", getattr(func, "__name__", str(func)))


def _run_on_lent(use: Callable[[], Any], lent: Iterable[nn.Parameter]) -> Any:
    """Run the operation while every owner lends its parameters."""
    of_owner: dict[int, tuple[Owner, list[nn.Parameter]]] = {}
    for parameter in lent:
        if (owner := owner_of(parameter)) is not None:
            members = of_owner.setdefault(id(owner), (owner, []))[1]
            if not any(parameter is member for member in members):
                members.append(parameter)
    for owner, members in of_owner.values():
        use = partial(owner.uses.run, members, use)
    return use()


def adopt(parameter: nn.Parameter, owner: Owner, fqn: str) -> None:
    """Record the parameter's owner, which can show it, and its name."""
    _owners[parameter] = (weakref.ref(owner), fqn)


def owner_of(parameter: nn.Parameter) -> Owner | None:
    """Return the owner that adopted the parameter, or None if it is gone or never existed."""
    found = _owners.get(parameter)  # type: ignore[no-untyped-call]
    owner: Owner | None = None if found is None else found[0]()
    return owner


def owners() -> list[Owner]:
    """Return all existing owners of existing parameters, each once."""
    found = (reference() for reference, _ in list(_owners.values()))  # type: ignore[no-untyped-call]
    return list({id(owner): owner for owner in found if owner is not None}.values())


def fqn_of(parameter: nn.Parameter) -> str:
    """Return the name under which the parameter was adopted."""
    fqn: str = _owners[parameter][1]
    return fqn


def nan_of(dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return a 0-d NaN; zero in a dtype without NaN."""
    nan = torch.zeros((), dtype=dtype, device=device)
    return nan.fill_(float("nan")) if dtype.is_floating_point else nan


def hide(parameter: nn.Parameter, nan: torch.Tensor) -> None:
    """Make an adopted parameter refuse reads. `nan` is a 0-d tensor of its dtype on its device."""
    parameter.data = nan.expand(parameter.shape)
    parameter.__class__ = ShardedParameter


def show(parameter: nn.Parameter, original: type[nn.Parameter], values: torch.Tensor) -> None:
    """Undo `hide`: `values` is the view of the unit's flat buffer."""
    parameter.__class__ = original
    parameter.data = values


class ParameterViews:
    """Shows and hides the values of one unit's parameters; the objects stay."""

    def __init__(self, parameters: Sequence[nn.Parameter], views: Sequence[torch.Tensor]) -> None:
        """`views` are the parameters' places in the whole weights."""
        self._parameters, self._views = parameters, views
        self.classes = [type(parameter) for parameter in parameters]
        """Classes of the parameters while they are shown."""
        self._nan = nan_of(views[0].dtype, views[0].device)

    def show_all(self) -> None:
        """Make the parameters views of the whole weights."""
        for parameter, original, view in zip(self._parameters, self.classes, self._views, strict=True):
            show(parameter, original, view)

    def hide_all(self) -> None:
        """Make the parameters refuse reads: their values are elsewhere, or about to change."""
        for parameter in self._parameters:
            hide(parameter, self._nan)

    def show(self, parameter: nn.Parameter) -> None:
        """Show one parameter."""
        place = next(index for index, member in enumerate(self._parameters) if member is parameter)
        show(parameter, self.classes[place], self._views[place])

    def hide(self, parameter: nn.Parameter) -> None:
        """Hide one parameter."""
        hide(parameter, self._nan)

    def moved(self) -> list[tuple[int, torch.Tensor]]:
        """Return index and place of each parameter that is shown and was given other memory."""
        pairs = enumerate(zip(self._parameters, self._views, strict=True))
        return [
            (index, view)
            for index, (parameter, view) in pairs
            if parameter.data_ptr() != view.data_ptr() and (view.numel() or parameter.numel())
        ]

    def release(self) -> None:
        """Give the parameters, whose values are whole, tensors of their own."""
        for parameter, original, view in zip(self._parameters, self.classes, self._views, strict=True):
            show(parameter, original, view.clone())


def _text(fqn: str, tensor: torch.Tensor) -> str:
    return (
        f"ShardedParameter({fqn!r}, shape={tuple(tensor.shape)}, dtype={tensor.dtype}, values on other ranks)"
    )


Placeholder = TypeVar("Placeholder", bound=torch.Tensor)


def found_in(tree: Any, kind: type[Placeholder]) -> Iterator[Placeholder]:
    """Yield the tensors of that class among the arguments of a call."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from found_in(item, kind)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from found_in(item, kind)


def _getters(*names: str) -> set[Any]:
    # torch drops and adds attributes between versions
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


HARMLESS = {
    *_getters(
        "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim", "names"
    ),
    *_getters(
        "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla"
    ),
    *_getters(
        "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "output_nr", "retains_grad", "nbytes"
    ),
    *_getters("itemsize"),
    vars(torch._C.TensorBase)["grad"].__set__,
    vars(torch._C.TensorBase)["grad"].__delete__,
    vars(torch._C.TensorBase)["requires_grad"].__set__,
    torch.Tensor.requires_grad_,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.get_device,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.__len__,
    torch.Tensor.__hash__,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
"""Functions that read properties of a tensor and not its elements, and its gradient slot."""
