"""Replacements for torch's functions on gradients, correct for parameters that an engine trains.

Scripts call `torch.nn.utils.clip_grad_norm_` and the like with the model's parameters, often by a name that
they imported before this package. These functions are closures over their implementation
(`clip_grad._no_grad`). So the first engine of a process puts our function into that cell, and all later calls
reach it. It looks the parameters up: if no open engine trains one of them, torch's own code runs with the
caller's arguments. `torch.amp.GradScaler` is replaced at the method that divides gradients.
docs/adr/0050-gradients-of-others-code.md has the alternatives.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from types import GeneratorType, SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from torch.nn.utils import clip_grad

from zerotrain.runtime.zero import clipping
from zerotrain.runtime.zero.sharded_model import ShardedModel
from zerotrain.runtime.zero.slots import ShardedGradient

_cores: WeakSet[ShardedModel] = WeakSet()


def serve(core: ShardedModel) -> None:
    """Make torch's functions work on this engine's gradients from now on."""
    _cores.add(core)
    _redirect()


@cache
def _redirect() -> None:
    _replace("clip_grad_norm_", _clip_grad_norm_)
    _replace("clip_grad_value_", _clip_grad_value_)
    _replace("_get_total_norm", _get_total_norm)
    _replace("_clip_grads_with_norm_", _clip_grads_with_norm_)
    scaler = torch.amp.GradScaler
    scaler._unscale_grads_ = _switch(scaler._unscale_grads_, _unscale)  # type: ignore[method-assign]


def _replace(name: str, ours: Callable[..., Any]) -> None:
    """Make one of torch's functions call `ours(original, *args, **kwargs)` while there are engines."""
    function = getattr(clip_grad, name)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "func" in cells:
        cells["func"].cell_contents = _switch(cells["func"].cell_contents, ours)
        return
    for module in (clip_grad, torch.nn.utils):
        for each in [each for each, value in vars(module).items() if value is function]:
            setattr(module, each, _switch(function, ours))
    warnings.warn(
        f"torch {torch.__version__} defines {name.lstrip('_')} in another way than this version of zerotrain "
        "knows: call it as an attribute of torch.nn.utils, as a name that was imported from there before "
        "initialize() does not see the engine's gradients",
        stacklevel=2,
    )


def _switch(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _has_engines():
            return original(*args, **kwargs)
        return ours(original, *args, **kwargs)

    return call


def _has_engines() -> bool:
    # A compiled caller keeps torch's own code: an engine's gradients are not part of a graph.
    return bool(_cores) and not torch.compiler.is_compiling()


def _clip_grad_norm_(
    original: Callable[..., Any],
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Any:
    items = _listed(parameters)
    owned, others = clipping.split(items)
    if not owned:
        return original(_again(parameters, items), max_norm, norm_type, error_if_nonfinite, foreach)
    norm = clipping.total_norm(
        owned,
        norm_type,
        error_if_nonfinite=error_if_nonfinite,
        what="clip_grad_norm_",
        others=lambda: _norm_of(_grads_of(others), norm_type, foreach),
    )
    total = clipping.as_tensor(norm, owned)
    if (factor := clipping.clip_factor(max_norm, norm)) != 1.0:
        clipping.scale(owned, factor)
    if others:
        torch.nn.utils.clip_grads_with_norm_(others, max_norm, total, foreach)
    return total


def _clip_grads_with_norm_(
    original: Callable[..., Any],
    parameters: Any,
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    items = _listed(parameters)
    owned, others = clipping.split(items)
    if not owned or others:
        original(others if owned else _again(parameters, items), max_norm, total_norm, foreach)
    for core, slots in owned.items():
        if not clipping.settle(core, "clip_grads_with_norm_"):
            continue
        norm = float(total_norm)
        rows = core.comm.gather_record([norm], label="clip_grads_with_norm_")
        if len({str(row[0]) for row in rows}) > 1:
            raise RuntimeError(
                f"clip_grads_with_norm_ was called with another total_norm on each rank ({rows[0][0]} on "
                f"rank 0, {norm} on rank {core.comm.rank}), by which the gradients would be scaled "
                "differently; get the norm over all ranks from torch.nn.utils.clip_grad_norm_, "
                "get_total_norm or optimizer.clip_grad_norm_"
            )
        if (factor := clipping.clip_factor(max_norm, norm)) != 1.0:
            clipping.scale({core: slots}, factor)


def _clip_grad_value_(
    original: Callable[..., Any], parameters: Any, clip_value: float, foreach: bool | None = None
) -> None:
    items = _listed(parameters)
    owned, others = clipping.split(items)
    if not owned or others:
        original(others if owned else _again(parameters, items), clip_value, foreach)
    clipping.clamp(owned, clip_value, what="clip_grad_value_")


def _get_total_norm(
    original: Callable[..., Any],
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Any:
    """Compute the norm of gradients (the contents of `p.grad`), not of parameters."""
    items = _listed(tensors)
    known = _known_gradients()
    found = [known.get(_key_of(tensor)) for tensor in items]
    owned: dict[ShardedModel, list[clipping.GradientSlot]] = {}
    for place in found:
        if place is not None:
            owned.setdefault(place[0], []).append(place[1])
    if not owned:
        return original(_again(tensors, items), norm_type, error_if_nonfinite, foreach)
    rest = [tensor for tensor, place in zip(items, found, strict=True) if place is None]
    norm = clipping.total_norm(
        owned,
        norm_type,
        error_if_nonfinite=error_if_nonfinite,
        what="get_total_norm",
        others=lambda: _norm_of(rest, norm_type, foreach),
    )
    return clipping.as_tensor(norm, owned)


def _unscale(
    original: Callable[..., Any],
    scaler: Any,
    optimizer: Any,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> dict[torch.device, torch.Tensor]:
    """Replacement for `GradScaler._unscale_grads_`: the ranks agree on non-finite values, so that all skip
    the step."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    owned, others = clipping.split(parameters)
    if not owned:
        answer: dict[torch.device, torch.Tensor] = original(
            scaler, optimizer, inv_scale, found_inf, allow_fp16
        )
        return answer
    for core in owned:
        if core.callbacks.gradient_scale() != 1.0:
            raise RuntimeError(
                "torch.amp.GradScaler cannot unscale gradients that the engine holds with a scale of its own "
                "(fp16's loss scale, or gradient_accumulation_steps that a bf16 loss is not divided by yet); "
                "make it with enabled=False and call optimizer.scale(loss).backward() or "
                "engine.backward(loss)"
            )
    inverse = float(inv_scale)
    met = clipping.unscale(owned, inverse, what="GradScaler.unscale_")
    found = {core.comm.device: found_inf.to(core.comm.device) + float(met) for core in owned}
    if others:
        rest = SimpleNamespace(param_groups=[{"params": others}])
        for device, value in original(scaler, rest, inv_scale, found_inf, allow_fp16).items():
            found[device] = found[device] + value if device in found else value
    return found


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _again(given: Any, items: list[Any]) -> Any:
    """Return the argument in the form that the caller gave: a generator was consumed."""
    return (item for item in items) if isinstance(given, GeneratorType) else items


def _grads_of(parameters: Iterable[Any]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _norm_of(gradients: Sequence[torch.Tensor], norm_type: float, foreach: bool | None) -> float:
    return float(torch.nn.utils.get_total_norm(gradients, norm_type, False, foreach)) if gradients else 0.0


def _known_gradients() -> dict[tuple[int, int], tuple[ShardedModel, clipping.GradientSlot]]:
    """Return all contents of `p.grad` of open engines, by `_key_of`."""
    found: dict[tuple[int, int], tuple[ShardedModel, clipping.GradientSlot]] = {}
    for core in _cores:
        for part in () if core.is_closed else core.gradients.values():
            for index, shown in enumerate(part.slots.shown or ()):
                found[_key_of(shown)] = core, clipping.GradientSlot(part, index)
    return found


def _key_of(gradient: torch.Tensor) -> tuple[int, int]:
    """Return a key that is equal for `p.grad`, `p.grad.detach()` and `p.grad.data`: address and size."""
    if isinstance(gradient, ShardedGradient):
        return id(gradient.slots()), -1 - gradient.place
    return gradient.data_ptr(), gradient.numel()
