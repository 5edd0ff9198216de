"""Finds tensors in whatever modules take and return: tuples, dicts, dataclasses, plain objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_MAX_DEPTH = 8  # bound for cyclic object graphs; real outputs nest three or four deep


def tensors_with_grad(tree: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield every tensor of an output through which gradients can come back."""
    if isinstance(tree, torch.Tensor):
        if tree.requires_grad:
            yield tree
        return
    if depth < _MAX_DEPTH:
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
