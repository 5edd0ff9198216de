"""Dtypes of what enters a bf16 or fp16 model: the arguments of the outermost call are cast, or errors about
their dtypes are explained.

[Note: entries] A script may call the model, a module of it, or a method that calls its modules (`generate`,
`model.encode(x)`). The outermost module with hooks that is called is the entry (zero/passes.py), and only it
is treated here: its hook is registered when it is entered and removed at the next entry, so modules within
pay nothing. `generate` is wrapped, as it may use modules without hooks first. Modules around the units
(`get_encoder()`, `model.backbone`), and layers beside them that share a unit, have one hook of their own,
since no unit ends with their calls; there are few. A layer within a unit, entered directly, is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zerotrain.contract.config import EngineConfig
from zerotrain.runtime.facade.dtype_errors import explain_arguments, explain_dtype_error, float32_arguments
from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
from zerotrain.runtime.zero.hooks import Boundary, in_graph_task, untraced
from zerotrain.runtime.zero.names import innermost
from zerotrain.runtime.zero.sharded_model import ShardedModel
from zerotrain.runtime.zero.trees import cast_float32, has_float32


class Entries:
    """Calls from outside into one model that computes in bf16 or fp16."""

    def __init__(self, core: ShardedModel, config: EngineConfig) -> None:
        """Begin to cast or to explain, until `detach`; do nothing where the model computes in fp32."""
        self._core, self._config = core, config
        self._compute = config.precision.compute_dtype
        self._casts = config.precision.cast_inputs
        self._last: tuple[str, list[str]] = "", []
        """The last entry, and its fp32 arguments."""
        self._hook: RemovableHandle | None = None
        """Hook of the last entry, if that is not the model."""
        self._outer: nn.Module | None = None
        """Module outside the units that was entered directly and runs."""
        self._wrapped: list[tuple[nn.Module, Any]] = []
        """Modules whose `generate` is wrapped, and their own attribute of that name before."""
        if self._compute == "fp32":
            return
        explain = untraced(self._after)
        core.until_closed(core.model.register_forward_hook(explain, always_call=True, with_kwargs=True))
        for module in outside_units(core.model, {unit.module for unit in core.layout.units}):
            gate = module.register_forward_pre_hook(self._enter_outer, prepend=True, with_kwargs=True)
            core.until_closed(gate)
        for module in core.model.modules():
            if callable(getattr(type(module), "generate", None)):
                self._wrap_generate(module)

    def detach(self) -> None:
        """Restore the modules."""
        self._forget()
        for module, before in self._wrapped:
            vars(module).pop("generate", None)
            if before is not None:
                vars(module)["generate"] = before
        self._wrapped.clear()

    def explain_backward(self, error: BaseException) -> None:
        """Explain an error of the backward pass, where a loss of bf16 outputs and fp32 targets may raise."""
        if isinstance(error, RuntimeError):
            explain_arguments(error, *self._last, compute_dtype=self._compute)

    def enter(self, boundary: Boundary, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with which an entry is called."""
        if self._compute == "fp32" or self._outer is not None:  # that one is the entry
            return args, kwargs
        self._forget()
        module = boundary.module
        if boundary.name and module._compiled_call_impl is None:  # a new hook would compile it again
            self._hook = module.register_forward_hook(self._after, always_call=True, with_kwargs=True)
        return self._cast(args, kwargs)

    def _enter_outer(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Treat a module outside the units as an entry, unless it is called within one."""
        # First: what the compiler traces ends here, without a guard.
        if torch.compiler.is_compiling() or self._core.passes.entry is not None or self._outer is not None:
            return None
        if in_graph_task():  # checkpointing calls again what it called within an entry
            return None
        self._forget()
        if module._compiled_call_impl is None:
            self._outer = module
            self._hook = module.register_forward_hook(self._after, always_call=True, with_kwargs=True)
        return self._cast(args, kwargs)

    def _cast(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not self._casts:
            return args, kwargs
        cast: tuple[Any, Any] = cast_float32((args, kwargs), TORCH_DTYPES[self._compute])
        return cast

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Explain an error of the entry; a forward hook that torch also calls when forward raised."""
        plain = innermost(module)
        error = sys.exc_info()[1]
        if module is self._outer:
            self._outer = None
        if output is None and error is not None:
            self._core.passes.abandon(module)
            self._explain(error, plain, plain.forward, args, kwargs)
        if not self._casts:
            names = (
                list(float32_arguments(plain.forward, args, kwargs)) if has_float32((args, kwargs)) else []
            )
            self._last = f"{type(plain).__name__}.forward", names

    def _explain(
        self,
        error: BaseException,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        explain_dtype_error(error, self._core.model, self._config)
        if isinstance(error, RuntimeError | ValueError | TypeError) and not self._casts:
            name = f"{type(module).__name__}.{call.__name__}"
            names = list(float32_arguments(call, args, kwargs))
            explain_arguments(error, name, names, compute_dtype=self._compute)

    def _forget(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _wrap_generate(self, module: nn.Module) -> None:
        generate: Callable[..., Any] = getattr(module, "generate")  # noqa: B009  # for mypy a submodule

        @wraps(generate)
        def entered(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._cast(args, kwargs)
            try:
                return generate(*args, **kwargs)
            except Exception as error:
                self._explain(error, module, generate, args, kwargs)
                raise

        self._wrapped.append((module, vars(module).get("generate")))
        vars(module)["generate"] = entered


def outside_units(model: nn.Module, units: set[str]) -> Iterator[nn.Module]:
    """Yield the modules between the model and its units, and those beside them that share a unit with others:
    all that contain modules, except lists, or have parameters. Models have few, as their blocks are units."""
    outside = list(model.named_children())
    while outside:
        name, module = outside.pop()
        if name in units:
            continue
        children = list(module.named_children())
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if not is_list and (children or next(module.parameters(recurse=False), None) is not None):
            yield module
        outside += [(f"{name}.{child_name}", child) for child_name, child in children]
