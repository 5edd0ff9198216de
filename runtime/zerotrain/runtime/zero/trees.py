"""Finds tensors in whatever modules take and return: tuples, dicts, dataclasses, plain objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zerotrain.runtime.zero.transforms import unwrapped

MAX_DEPTH = 8  # bound for cyclic object graphs; real outputs nest three or four deep


def tensors_with_grad(tree: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield every tensor of an output through which gradients can come back."""
    if isinstance(tree, torch.Tensor):
        if (tensor := unwrapped(tree)).requires_grad:
            yield tensor
        return
    if depth < MAX_DEPTH:
        for child in _children(tree):
            yield from tensors_with_grad(child, depth + 1)


def _children(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        yield from tree.values()
    elif isinstance(tree, (list, tuple, set, frozenset)):
        yield from tree
    elif not isinstance(tree, (nn.Module, type)):
        yield from getattr(tree, "__dict__", {}).values()
        for name in getattr(type(tree), "__slots__", ()):
            yield getattr(tree, name, None)


def replace_tensors(
    tree: Any,
    wanted: Callable[[torch.Tensor], bool],
    replace: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> Any:
    """Rebuild the pytree with the wanted tensors replaced, all in one call; the same object if there is
    none."""
    leaves, spec = pytree.tree_flatten(tree)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and wanted(leaf)]
    if not places:
        return tree
    for index, fresh in zip(places, replace([leaves[index] for index in places]), strict=True):
        leaves[index] = fresh
    return pytree.tree_unflatten(leaves, spec)


def has_float32(tree: Any, depth: int = 0) -> bool:
    """Return whether `float32_paths` would yield anything."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            if leaf.dtype is torch.float32:
                return True
        elif depth < MAX_DEPTH and any(has_float32(part, depth + 1) for part in _parts(leaf).values()):
            return True
    return False


def float32_paths(tree: Any, at: str = "", depth: int = 0) -> Iterator[str]:
    """Yield where the fp32 tensors of an argument are, as code that reads them: `batch['audio'][0]`.

    They are found in what torch's pytree knows, in dataclasses and in mutable mappings (`UserDict`).
    """
    for keys, leaf in pytree.tree_flatten_with_path(tree)[0]:
        here = f"{at}{pytree.keystr(keys)}"
        if isinstance(leaf, torch.Tensor):
            if leaf.dtype is torch.float32:
                yield here
        elif depth < MAX_DEPTH:
            is_mapping = isinstance(leaf, MutableMapping)
            for key, part in _parts(leaf).items():
                yield from float32_paths(
                    part, f"{here}[{key!r}]" if is_mapping else f"{here}.{key}", depth + 1
                )


def cast_float32(tree: Any, dtype: torch.dtype, depth: int = 0) -> Any:
    """Return an argument with the tensors of `float32_paths` cast; the same object if there is none.

    Containers are copied, so the caller's keep their tensors.
    """
    leaves, spec = pytree.tree_flatten(tree)
    cast = [_cast_leaf(leaf, dtype, depth) for leaf in leaves]
    is_same = all(new is old for new, old in zip(cast, leaves, strict=True))
    return tree if is_same else pytree.tree_unflatten(cast, spec)


def _cast_leaf(leaf: Any, dtype: torch.dtype, depth: int) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.to(dtype) if leaf.dtype is torch.float32 else leaf
    fresh = leaf
    for key, part in (_parts(leaf) if depth < MAX_DEPTH else {}).items():
        if (cast := cast_float32(part, dtype, depth + 1)) is part:
            continue
        fresh = copy.copy(leaf) if fresh is leaf else fresh
        if isinstance(leaf, MutableMapping):
            fresh[key] = cast
        else:
            object.__setattr__(fresh, key, cast)  # also into a frozen dataclass
    return fresh


def _parts(leaf: Any) -> Mapping[Any, Any]:
    """Return the parts of a leaf of torch's pytree that is a container for us: a dataclass or a mapping that
    can be written."""
    if isinstance(leaf, MutableMapping):
        return dict(leaf.items())
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, (nn.Module, type)):
        names = [field.name for field in dataclasses.fields(leaf)]
        return {name: getattr(leaf, name) for name in names if hasattr(leaf, name)}
    return {}
