"""Plain names of modules, parameters and buffers, as if no part of the model were wrapped.

`torch.compile(module)` and torch's `checkpoint_wrapper` put a module of their own around another one, and
torch then includes the wrapper's attribute in every name below (`_orig_mod.`, `_checkpoint_wrapped_module.`).
Checkpoints, exports and messages must not depend on whether a run compiles or recomputes, so this module
makes the names. A wrapper is recognised by its class, never by the text, and has the name of what it wraps. A
model's own attribute of such a name is treated like any other attribute.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zerotrain.runtime.zero.layout import LayoutError

_COMPILED = ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod")
_RECOMPUTED = (
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "ActivationWrapper",
    "_checkpoint_wrapped_module",
)
"""Module and class of a wrapper, and the attribute that holds what it wraps. The modules take seconds to
import, and until they are imported no model has such a wrapper."""

Layers = tuple[nn.Module, ...]
"""A module with the wrappers around it: the outermost wrapper first, the module itself last."""


def layers_of(module: nn.Module) -> Layers:
    """Return the wrappers of a module and the module they wrap, or the module alone."""
    layers = [module]
    while (inner := _wrapped_by(layers[-1])) is not None:
        layers.append(inner)
    return tuple(layers)


def innermost(module: nn.Module) -> nn.Module:
    """Return the module without the wrappers around it."""
    return layers_of(module)[-1]


def _wrapped_by(module: nn.Module) -> nn.Module | None:
    for wrapper in (_COMPILED, _RECOMPUTED):
        if _is(module, wrapper):
            return module._modules[wrapper[2]]
    return None


def _is(module: nn.Module, wrapper: tuple[str, str, str]) -> bool:
    home, name, _ = wrapper
    return isinstance(module, getattr(sys.modules.get(home), name, ()))


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` wraps the module, or its `compile()` was called."""
    return _is(module, _COMPILED) or module._compiled_call_impl is not None


def walk(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Layers]]:
    """Yield every module by its plain name, in the order of `named_modules`.

    With `remove_duplicate` a module with several names comes once, else by each of them.
    """
    yield from _walk(model, "", set() if remove_duplicate else None)


def _walk(module: nn.Module, name: str, seen: set[nn.Module] | None) -> Iterator[tuple[str, Layers]]:
    layers = layers_of(module)
    if seen is not None:
        if layers[-1] in seen:
            return
        seen.update(layers)
    yield name, layers
    for key, child in children_of(layers):
        yield from _walk(child, joined(name, key), seen)


def children_of(layers: Layers) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules directly below, by attribute."""
    for layer in layers:
        for key, child in layer._modules.items():
            if child is not None and not any(child is other for other in layers):
                yield key, child


def joined(prefix: str, name: str) -> str:
    """Join the name of a module and a name below it."""
    return f"{prefix}.{name}" if prefix else name


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules as torch's `named_modules` does, with plain names; a wrapper stands for what it wraps."""
    for name, layers in walk(model):
        yield name, layers[0]


def all_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules by plain name; wrappers and what they wrap all come, under one name."""
    for name, layers in walk(model):
        for layer in layers:
            yield name, layer


def named_parameters(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over parameters as torch's `named_parameters` does, with plain names."""
    return _named_tensors(model, "_parameters", remove_duplicate=remove_duplicate)


def named_buffers(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over buffers as torch's `named_buffers` does, with plain names."""
    return _named_tensors(model, "_buffers", remove_duplicate=remove_duplicate)


def _named_tensors(model: nn.Module, kind: str, *, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for prefix, layers in walk(model, remove_duplicate=remove_duplicate):
        for layer in layers:
            for key, tensor in getattr(layer, kind).items():
                if tensor is None or (remove_duplicate and id(tensor) in seen):
                    continue
                seen.add(id(tensor))
                yield joined(prefix, key), tensor


def holder_of(model: nn.Module, name: str) -> nn.Module:
    """Return the module on which the parameter or buffer of that plain name is registered."""
    *path, attribute = name.split(".")
    layers = layers_of(model)
    for key in path:
        layers = layers_of(next(child for found, child in children_of(layers) if found == key))
    return next(
        (layer for layer in layers if attribute in layer._parameters or attribute in layer._buffers),
        layers[-1],
    )


def check_names(model: nn.Module) -> None:
    """Raise LayoutError if a wrapper and what it wraps both have an attribute of the same name."""
    for name, layers in walk(model):
        owners: dict[str, nn.Module] = {}
        for layer in layers if len(layers) > 1 else ():
            tensors = {**layer._parameters, **layer._buffers}
            keys = [key for key, tensor in tensors.items() if tensor is not None]
            keys += [key for key, _ in children_of((layer,)) if layer._modules[key] not in layers]
            for key in keys:
                other = owners.setdefault(key, layer)
                if other is not layer:
                    raise LayoutError(
                        f"{joined(name, key)!r} is the name of two parts of the model: one of "
                        f"{type(other).__name__}, which wraps the module, and one of {type(layer).__name__}; "
                        "give one of them another name"
                    )


def plain_key(model: nn.Module, key: str) -> str:
    """Convert a key of `model.state_dict()` to the key in the plain model's state dict.

    torch's checkpoint_wrapper removes its own prefix from keys by a hook, torch.compile does not.
    """
    module: nn.Module | None = model
    parts = key.split(".")
    kept: list[str] = []
    for position, part in enumerate(parts):
        while module is not None and _is(module, _RECOMPUTED):
            module = _wrapped_by(module)
        if module is None:
            return ".".join([*kept, *parts[position:]])
        if part == _COMPILED[2] and _is(module, _COMPILED):
            module = _wrapped_by(module)
            continue
        kept.append(part)
        module = module._modules.get(part)
    return ".".join(kept)


def accept_plain_keys(model: nn.Module) -> list[RemovableHandle]:
    """Let `load_state_dict` accept the plain model's keys for modules that torch.compile wraps, as torch's
    checkpoint_wrapper does by itself; torch's own keys stay valid."""

    def rename(module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
        own = {*module._parameters, *module._buffers, *module._modules}  # the wrapper's, prefix included
        for key in [key for key in state if key.startswith(prefix)]:
            name = key.removeprefix(prefix)
            if name.partition(".")[0] not in own:
                state[f"{prefix}{_COMPILED[2]}.{name}"] = state.pop(key)

    compiled = [module for module in model.modules() if _is(module, _COMPILED)]
    return [module.register_load_state_dict_pre_hook(rename) for module in compiled]  # type: ignore[no-untyped-call]


def without_wrappers(name: str) -> str:
    """Remove the prefixes of torch's wrappers from a name in a file, for names whose model is not
    available."""
    for *_, word in (_COMPILED, _RECOMPUTED):
        name = name.replace(f"{word}.", "")
    return name


def has_wrappers(model: nn.Module) -> bool:
    """Return whether torch's own names below the model differ from the plain ones."""
    return any(_wrapped_by(module) is not None for module in innermost(model).modules())


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[None]:
    """Replace the wrappers below the model by what they wrap, within the context, so that torch's own names
    are the plain ones: for libraries that use those names. Not for forward passes."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for module in list(innermost(model).modules()):
        for key, child in module._modules.items():
            if child is not None and _wrapped_by(module) is None and _wrapped_by(child) is not None:
                replaced.append((module, key, child))
    try:
        for module, key, child in replaced:
            module._modules[key] = innermost(child)
        yield
    finally:
        for module, key, child in replaced:
            module._modules[key] = child
