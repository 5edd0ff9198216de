"""Runs constructors on the meta device and records their operations. Used only by `init_context`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from zerotrain.runtime.construct.log import ConstructionLog, TensorRef, is_random, written

_META = torch.device("meta")
_HOST = torch.device("cpu")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that gives new tensors no memory and records the operations on them instead."""

    def __init__(self, log: ConstructionLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Constructors are not compiled, and excluding them from the compiler imports it: one second, 70 MB.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # the real devices are needed here
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        names = {argument.name for argument in func._schema.arguments}
        if not any(tensor.is_meta for tensor in tensors) and (tensors or "device" not in names):
            return func(*args, **kwargs)  # constants such as torch.tensor([1, 2])
        if not _gives_tensors(func) or _mutates_real(func, args, kwargs):
            return self._now(func, args, kwargs)
        try:
            outputs = func(*_on_meta(args), **_on_meta(_placed(kwargs, _META, names)))
        except (NotImplementedError, RuntimeError):
            # Shapes that depend on values (nonzero, unique), or an error of the user: run it on the values.
            return self._now(func, args, kwargs)
        on_host = _placed(kwargs, _HOST, names)
        state = self._draw(func, args, on_host) if self._log.seed is None and is_random(func) else None
        self._log.record(func, args, on_host, outputs, state)
        return outputs

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """Draw the operation's random numbers, as the constructor does without a record, and drop them.
        Return the generator's state before."""
        generator = kwargs.get("generator") or torch.default_generator
        state: torch.Tensor = generator.get_state()
        overwritten = {id(each) for each in written(func, args, kwargs)}

        def real(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in overwritten:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_HOST)
            return self._real(tensor)

        func(*tree_map_only(torch.Tensor, real, args), **tree_map_only(torch.Tensor, real, kwargs))
        return state

    def _now(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._real, (args, kwargs))
        return func(*args, **kwargs)

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._log.materialise(tensor) if tensor.is_meta else tensor


class HostTensors(TorchFunctionMode):
    """Function mode that makes deferred tensors look like host tensors, as initialisers skip meta tensors.

    It also computes the values for calls that read them without reaching the dispatcher, such as `tolist`.
    """

    def __init__(self, log: ConstructionLog) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FACADE and isinstance(args[0], torch.Tensor) and self._knows(args[0]):
            if func is _IS_META:
                return False
            if func is _DEVICE:
                return _HOST
            with _disable_current_modes():
                args = (self._log.materialise(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))

    def _knows(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return self._log.knows(TensorRef.of(tensor))


_IS_META: Any = vars(torch._C.TensorBase)["is_meta"].__get__
_DEVICE: Any = vars(torch._C.TensorBase)["device"].__get__
_FACADE = {_IS_META, _DEVICE, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


def _gives_tensors(func: Any) -> bool:
    returns = func._schema.returns
    return not returns or any("Tensor" in str(item.type) for item in returns)


def _mutates_real(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return any(isinstance(each, torch.Tensor) and not each.is_meta for each in written(func, args, kwargs))


def _placed(kwargs: dict[str, Any], device: torch.device, names: set[str]) -> dict[str, Any]:
    """Return the arguments with every requested device replaced by `device`."""
    if "device" not in names:
        return kwargs
    placed = {**kwargs, "device": device}
    if "pin_memory" in kwargs:
        placed["pin_memory"] = None
    return placed


def _on_meta(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor if tensor.is_meta else tensor.to(_META), tree)
