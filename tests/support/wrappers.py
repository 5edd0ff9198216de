"""Functions that wrap a model or its parts in another module, and models to wrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)

from tests.support.tiny_models import TinyBlock, TinyGPT


def compiled(module: nn.Module, backend: str = "eager") -> Any:
    """Return the compiled module; torch.compile compiles nothing before a call."""
    return torch.compile(module, backend=backend)


def _each_block(model: TinyGPT, wrap: Callable[[nn.Module], Any]) -> TinyGPT:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(block)
    return model


def _by_torch(model: TinyGPT) -> TinyGPT:
    """Wrap blocks and the head with torch's own function."""
    apply_activation_checkpointing(
        model, check_fn=lambda part: isinstance(part, TinyBlock) or part is model.head
    )
    return model


def _reentrant(module: nn.Module) -> nn.Module:
    return checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.REENTRANT)


WRAPPED: dict[str, Callable[[TinyGPT], Any]] = {
    "plain": lambda model: model,
    "compiled": compiled,
    "compiled blocks": lambda model: _each_block(model, compiled),
    "recomputed": checkpoint_wrapper,
    "recomputed blocks": _by_torch,
    "recomputed blocks, reentrant": lambda model: _each_block(model, _reentrant),
    "recomputed compiled blocks": lambda model: _each_block(model, lambda b: checkpoint_wrapper(compiled(b))),
    "compiled recomputed blocks": lambda model: _each_block(model, lambda b: compiled(checkpoint_wrapper(b))),
    "compiled, of recomputed blocks": lambda model: compiled(_by_torch(model)),
    "offloaded blocks": lambda model: _each_block(model, offload_wrapper),
}
"""Functions that wrap a model, by description."""
