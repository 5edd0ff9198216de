"""Modes of torch in which the engine could not keep the tensors that it makes: torch.func's transforms (vmap,
grad, jvp, ...), which wrap them, and inference mode.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from zerotrain.runtime.zero.callers import has_swapped_parameters

_functorch = torch._C._functorch
_KIND = _functorch.TransformType

is_transformed = _functorch.peek_interpreter_stack
"""Returns the innermost transform that runs, None if none does."""


_NOTHING = nullcontext()


def outside_transforms() -> AbstractContextManager[object]:
    """Return a context in which no transform runs, for what the engine makes and keeps."""
    return temporarily_clear_interpreter_stack() if is_transformed() else _NOTHING


def outside_inference_mode() -> AbstractContextManager[object]:
    """Return a context without `torch.inference_mode()`, whose tensors cannot be written later."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING


def reads_weights_later() -> bool:
    """Return whether a transform runs that has a backward pass of its own, or whose inputs are parameters of
    the model."""
    kinds = [each.key() for each in _functorch.get_interpreter_stack() or ()]
    return _KIND.Grad in kinds or (_KIND.Jvp in kinds and has_swapped_parameters())


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that autograd sees outside of all transforms."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
