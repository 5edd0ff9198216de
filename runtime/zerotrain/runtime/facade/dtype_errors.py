"""Explanation of torch's dtype errors: which tensors of the model do not have the compute dtype, and which
key of the configuration casts them. Called when the outermost forward call raised."""

from __future__ import annotations

import re
from itertools import islice

from torch import nn

from zerotrain.contract.config import EngineConfig
from zerotrain.runtime.construct.buffers import kept_buffers
from zerotrain.runtime.zero.dtypes import TORCH_DTYPES

SWITCH = "data_types.buffer_dtype"
_NAMED = 5
_KINDS = (RuntimeError, ValueError, TypeError)
_ABOUT_DTYPES = re.compile(r"dtype|(scalar|data|input|have the|same) type", re.IGNORECASE)
_FLOATING = re.compile(r"float|half|double", re.IGNORECASE)


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
