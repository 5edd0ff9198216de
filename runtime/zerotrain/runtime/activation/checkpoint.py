"""`checkpoint_activations`: runs a part of a model, keeps its inputs, and runs it again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zerotrain.runtime.activation import random_states
from zerotrain.runtime.activation.kept import KeptInputs
from zerotrain.runtime.activation.settings import Settings, current


def checkpoint_activations(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)` without keeping its activations; backward calls it again.

    Results and gradients equal those of a plain call to the last bit: random numbers (CPU and CUDA, and those
    of `deepspeed.checkpointing.get_cuda_rng_tracker`) and autocast are as in the first call.
    `configure_checkpointing`, or the `activation_checkpointing` block of the configuration, decides where
    inputs are kept meanwhile. Without gradients it is a plain call.

    The function must do the same both times, and not change its inputs in place. With partitioning, all ranks
    of the model-parallel group call it in the same order.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    settings, arena = current()
    if settings.synchronize or settings.profile:
        function = _observed(function, settings)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    anchors = _anchors(leaves)
    if not settings.moves_inputs:

        def call(_anchors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return torch_checkpoint(
            call, anchors, *args, use_reentrant=False, context_fn=random_states.contexts(), **kwargs
        )
    with torch.no_grad():
        kept = KeptInputs(leaves, settings, arena)

    def run(_anchors: list[torch.Tensor], *leaves: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(kept.fetch(leaves), spec)
        try:
            return function(*args, **kwargs)
        finally:
            kept.end_part()

    return torch_checkpoint(
        run, anchors, *kept.leaves, use_reentrant=False, context_fn=random_states.contexts()
    )


def _anchors(leaves: Iterable[object]) -> list[torch.Tensor]:
    """Return an empty tensor on each GPU whose random state torch must save.

    torch looks for GPUs only in positional arguments, and not inside objects.
    """
    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda}
    if not devices and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = {torch.device("cuda", torch.cuda.current_device())}
    return [torch.empty(0, device=device) for device in devices]


def _observed(function: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    """Wrap the function to synchronise the device before and after it and, if configured, to print its
    time."""
    name = _name_of(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        _synchronize()
        began = perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            _synchronize()
            if settings.profile and (not dist.is_initialized() or dist.get_rank() == 0):
                pass_name = "forward" if torch._C._current_graph_task_id() == -1 else "recomputation"
                seconds = perf_counter() - began
                print(f"zerotrain: checkpointed {name}: {pass_name} {1e3 * seconds:.2f} ms", flush=True)

    return call


def _name_of(function: Callable[..., Any]) -> str:
    if isinstance(function, partial):
        return _name_of(function.func)
    if isinstance(function, torch.nn.Module):
        return type(function).__name__
    return str(getattr(function, "__qualname__", type(function).__name__))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
