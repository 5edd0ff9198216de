"""Explanation of dtype errors from fp32 arguments of a model that computes in bf16 or fp16.

Arguments are passed on unchanged: timesteps, coordinates and targets would lose digits otherwise. Only
`auto_cast` in the bf16 or fp16 block casts them. An operator that cannot mix dtypes (a convolution of fp32
audio with bf16 weights) raises torch's error, which names neither. This module adds the arguments' names and
the setting to its text.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
from zerotrain.runtime.zero.trees import float32_paths

_ABOUT_DTYPES = re.compile(r"dtype|(scalar|data|input|weight|bias|same) type|type promoting", re.IGNORECASE)
_FLOATING = re.compile(r"float|half", re.IGNORECASE)
_MAX_NAMED = 8
"""Largest number of arguments named in an error message; the rest is counted."""
_MARK = "auto_cast"


def explain_arguments(error: Exception, call: str, names: list[str], *, compute_dtype: str) -> None:
    """Add to the text of an error about dtypes the fp32 arguments of a call (`Model.forward`) and the remedy.

    The exception keeps its identity, type and traceback. Errors about something else, and calls without fp32
    arguments, are left alone.
    """
    if not names or not _is_unexplained(error):
        return
    shown = ", ".join(names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
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
    is_torchs = isinstance(error, RuntimeError) or _FLOATING.search(text) is not None
    return _MARK not in text and is_torchs and _ABOUT_DTYPES.search(text) is not None


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
