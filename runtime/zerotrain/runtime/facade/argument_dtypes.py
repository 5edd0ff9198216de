"""Explanation of dtype errors from fp32 arguments of a model that computes in bf16 or fp16.

Arguments are passed on unchanged: timesteps, coordinates and targets would lose digits otherwise. Only
`auto_cast` in the bf16 or fp16 block casts them. An operator that cannot mix dtypes (a convolution of fp32
audio with bf16 weights) raises torch's error, which names neither. This module adds the arguments' names and
the setting to its text.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from zerotrain.contract.config import PrecisionConfig
from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
from zerotrain.runtime.zero.hooks import COMPILER
from zerotrain.runtime.zero.names import innermost
from zerotrain.runtime.zero.sharded_model import ShardedModel, until_closed
from zerotrain.runtime.zero.trees import float32_paths, has_float32

_ABOUT_DTYPES = re.compile(r"dtype|(scalar|data|input|weight|bias|same) type|type promoting", re.IGNORECASE)
_FLOATING = re.compile(r"float|half", re.IGNORECASE)
_MAX_NAMED = 8
"""Largest number of arguments named in an error message; the rest is counted."""
_MARK = "auto_cast"


def watch_arguments(core: ShardedModel, precision: PrecisionConfig) -> ArgumentWatch | None:
    """Explain dtype errors of the model's forward from now on, until the engine is closed; None where the
    model computes in fp32 or casts its arguments."""
    if precision.compute_dtype == "fp32" or precision.cast_inputs:
        return None
    watch = ArgumentWatch(precision.compute_dtype)
    hook = watch.after
    if (compiler := sys.modules.get(COMPILER)) is not None:  # see hooks.py
        hook = compiler.disable(hook)
    until_closed(core, core.model.register_forward_hook(hook, always_call=True, with_kwargs=True))
    return watch


class ArgumentWatch:
    """Observes every call of the model; acts only when the call or its backward pass raises."""

    def __init__(self, compute_dtype: str) -> None:
        self._compute_dtype = compute_dtype
        self._last: tuple[str, list[str]] = "", []
        """The model's class, and the fp32 arguments of its last call."""

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Explain an error of the call; a forward hook that torch also calls when forward raised."""
        error = sys.exc_info()[1]
        if output is None and isinstance(error, RuntimeError | ValueError | TypeError):
            explain_argument_dtypes(error, module, args, kwargs, compute_dtype=self._compute_dtype)
        names = list(float32_arguments(module, args, kwargs)) if has_float32((args, kwargs)) else []
        self._last = type(innermost(module)).__name__, names

    def explain_backward(self, error: BaseException) -> None:
        """Explain an error of the backward pass, where a loss of bf16 outputs and fp32 targets may raise."""
        if isinstance(error, RuntimeError):
            _explain(error, *self._last, compute_dtype=self._compute_dtype)


def explain_argument_dtypes(
    error: RuntimeError | ValueError | TypeError,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    compute_dtype: str,
) -> None:
    """Add to the text of an error about dtypes the fp32 arguments of `module`'s forward and the remedy.

    The exception keeps its identity, type and traceback. Errors about something else, and calls without fp32
    arguments, are left alone.
    """
    if _is_unexplained(error):
        names = list(float32_arguments(module, args, kwargs))
        _explain(error, type(innermost(module)).__name__, names, compute_dtype=compute_dtype)


def _explain(error: Exception, model: str, names: list[str], *, compute_dtype: str) -> None:
    if not names or not _is_unexplained(error):
        return
    shown = ", ".join(names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    dtype = str(TORCH_DTYPES[compute_dtype]).removeprefix("torch.")
    error.args = (
        f"{error}\n{model}.forward got float32 in {shown}{more} while its weights are {dtype}, and arguments "
        f"are not cast unless the configuration asks for it. Cast them in the script (.to({dtype})), or set "
        f'{compute_dtype}.auto_cast to true: "{compute_dtype}": {{"enabled": true, "auto_cast": true}} casts '
        "every float32 argument.",
        *error.args[1:],
    )


def _is_unexplained(error: Exception) -> bool:
    """Return whether an error concerns dtypes and has no explanation yet. RuntimeErrors are mostly torch's
    own; the other types come from anywhere, and must name a dtype."""
    text = str(error)
    is_torchs = isinstance(error, RuntimeError) or _FLOATING.search(text) is not None
    return _MARK not in text and is_torchs and _ABOUT_DTYPES.search(text) is not None


def float32_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a call's fp32 tensors: those of forward's signature, with the path into nested
    containers, as in `batch['audio'][0]`."""
    named = [*zip(_positional_names(module, len(args)), args, strict=True), *kwargs.items()]
    for name, value in named:
        yield from float32_paths(value, name)


def _positional_names(module: nn.Module, count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(innermost(module).forward).parameters.values())
    except (TypeError, ValueError):  # compiled code without a signature
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in positional][:count]
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), "args")
    return [*names, *(f"{rest}[{index}]" for index in range(count - len(names)))]
