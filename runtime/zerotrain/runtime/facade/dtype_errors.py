"""Explanation of torch's dtype errors: which buffers of the model or arguments of its call do not have the
compute dtype, and which key of the configuration casts them. Called when the outermost call raised.

Arguments are passed on unchanged: timesteps, coordinates and targets would lose digits otherwise. Only
`auto_cast` in the bf16 or fp16 block casts them. An operator that cannot mix dtypes (a convolution of fp32
audio with bf16 weights) raises torch's error, which names neither. This module adds the names and the setting
to its text.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch import nn

from zerotrain.contract.config import EngineConfig
from zerotrain.runtime.construct.buffers import kept_buffers
from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
from zerotrain.runtime.zero.trees import float32_paths

SWITCH = "data_types.buffer_dtype"
_NAMED = 5
_KINDS = (RuntimeError, ValueError, TypeError)
_ABOUT_DTYPES = re.compile(r"dtype|(scalar|data|input|have the|same) type", re.IGNORECASE)
_FLOATING = re.compile(r"float|half|double", re.IGNORECASE)
_ABOUT_ARGUMENTS = re.compile(
    r"dtype|(scalar|data|input|weight|bias|same) type|type promoting", re.IGNORECASE
)
_FLOATING_ARGUMENT = re.compile(r"float|half", re.IGNORECASE)
_NAMED_ARGUMENTS = 8
"""Largest number of arguments named in an error message; the rest is counted."""
ARGUMENT_SWITCH = "auto_cast"


def explain_dtype_error(error: BaseException | None, model: nn.Module, config: EngineConfig) -> None:
    """Add to a dtype error of torch's which floating buffers do not have the compute dtype, and how to cast
    them.

    The raised error keeps its type and traceback; its cause is an error with torch's own text. Other errors,
    and those of models without such buffers, stay as they are.
    """
    compute = config.precision.compute_dtype
    if compute == "fp32" or not isinstance(error, _KINDS):
        return
    text = str(error)
    if SWITCH in text or not (_ABOUT_DTYPES.search(text) and _FLOATING.search(text)):
        return
    names = kept_buffers(model, TORCH_DTYPES[compute])
    if not names:
        return
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    shown = ", ".join(
        f"{name!r} ({str(dtype).removeprefix('torch.')})" for name, dtype in islice(names.items(), _NAMED)
    )
    _add(
        error,
        f"The model computes in {compute}, but buffers keep the dtype they were given: {shown}{more}. If one "
        f'of them met a weight or an activation here, set {SWITCH} to "{compute}" '
        "(data_types.keep_in_fp32_modules exempts buffers by name), cast it in forward, or configure "
        f"torch_autocast instead of {compute}",
    )


def _add(error: Exception, explanation: str) -> None:
    # The constructors of the compiler's errors take more arguments.
    kind = type(error) if type(error) in _KINDS else RuntimeError
    original = kind(str(error)).with_traceback(error.__traceback__)
    error.args = (f"{str(error).rstrip('. ')}. {explanation}", *error.args[1:])
    error.__cause__ = original
    if explanation not in str(error):
        error.add_note(explanation)


def explain_arguments(error: Exception, call: str, names: list[str], *, compute_dtype: str) -> None:
    """Add to the text of an error about dtypes the fp32 arguments of a call (`Model.forward`) and the remedy.

    The exception keeps its identity, type and traceback. Errors about something else, and calls without fp32
    arguments, are left alone.
    """
    if not names or not _is_unexplained(error):
        return
    shown = ", ".join(names[:_NAMED_ARGUMENTS])
    more = f" and {len(names) - _NAMED_ARGUMENTS} more" if len(names) > _NAMED_ARGUMENTS else ""
    dtype = str(TORCH_DTYPES[compute_dtype]).removeprefix("torch.")
    error.args = (
        f"{error}\n{call} got float32 in {shown}{more} while its weights are {dtype}, and arguments "
        f"are not cast unless the configuration asks for it. Cast them in the script (.to({dtype})), or set "
        f'{compute_dtype}.auto_cast to true: "{compute_dtype}": {{"enabled": true, "auto_cast": true}} casts '
        "every float32 argument.",
        *error.args[1:],
    )


def _is_unexplained(error: Exception) -> bool:
    """Return whether an error concerns dtypes and has no explanation yet. RuntimeErrors are mostly torch's
    own; the other types come from anywhere, and must name a dtype."""
    text = str(error)
    is_torchs = isinstance(error, RuntimeError) or _FLOATING_ARGUMENT.search(text) is not None
    return ARGUMENT_SWITCH not in text and is_torchs and _ABOUT_ARGUMENTS.search(text) is not None


def float32_arguments(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the names of a call's fp32 tensors: those of its signature, with the path into nested containers,
    as in `batch['audio'][0]`."""
    named = [*zip(_positional_names(call, len(args)), args, strict=True), *kwargs.items()]
    for name, value in named:
        yield from float32_paths(value, name)


def _positional_names(call: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):  # compiled code without a signature
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in positional][:count]
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), "args")
    return [*names, *(f"{rest}[{index}]" for index in range(count - len(names)))]
