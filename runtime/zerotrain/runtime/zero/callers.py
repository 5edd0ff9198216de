"""Finds the model's own code on the Python stack, to determine what uses a parameter.

Only called when a partitioned parameter is read (`uses.py`) or a pass looks stale, so ordinary calls of
modules pay nothing for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum
from types import FrameType

from torch import nn
from torch.nn.utils import stateless

_OURS = "zerotrain.runtime.zero"
_SWAPPING = stateless._functional_call.__code__
_MACHINERY = nn.Module.__call__.__code__.co_filename
"""File of torch's own module code (state_dict, to, apply); a call from there is not a use of the weights."""


class Caller(Enum):
    """Kind of the model's code that is running."""

    NOTHING = "nothing"
    METHOD = "method"
    FORWARD = "forward"


def caller_in(model: nn.Module) -> Caller:
    """Return whether a `forward` or another method of the model, of a module in it or of one around it is
    running.

    NOTHING also if torch's own module code (`state_dict`, `to`) is the direct caller.
    """
    found = Caller.NOTHING
    is_first = True
    for frame in _frames():
        code = frame.f_code
        if is_first and code.co_filename == _MACHINERY:
            return Caller.NOTHING
        is_first = False
        if code.co_filename == _MACHINERY or not _is_method_of(frame, model):
            continue
        if code.co_name == "forward":
            return Caller.FORWARD
        found = Caller.METHOD
    return found


def is_running(module: nn.Module) -> bool:
    """Return whether a call of the module is on the stack of this thread."""
    return any(
        frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module for frame in _frames()
    )


def has_swapped_parameters() -> bool:
    """Return whether `torch.func.functional_call` is on the stack of this thread: for its duration the model
    holds tensors of the script in place of parameters."""
    return any(frame.f_code is _SWAPPING for frame in _frames())


def _frames() -> Iterator[FrameType]:
    """Yield the frames, innermost first, without those of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_OURS):
            yield frame
        frame = frame.f_back


def _is_method_of(frame: FrameType, model: nn.Module) -> bool:
    code = frame.f_code
    owner, _, _ = code.co_qualname.rpartition(".")
    if not owner or not code.co_argcount:
        return False  # avoids reading the locals of plain functions
    first = frame.f_locals.get(code.co_varnames[0])
    if not isinstance(first, nn.Module) or owner not in {kind.__qualname__ for kind in type(first).__mro__}:
        return False
    return any(first is each for each in model.modules()) or any(model is each for each in first.modules())
