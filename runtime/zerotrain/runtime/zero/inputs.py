"""Inputs of a module's forward call, which gets aliases of them: the backward pass of the call ends at the
node that makes the aliases.

A module may change what it gets: write into a tensor, or add results to a list or dict. Its caller sees both,
as without the engine: lists and dicts stay the same objects, and a tensor that was written takes the history
of its alias.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import grad_mode

from zerotrain.runtime.zero.trees import tensors_with_grad

Alias = Callable[..., tuple[torch.Tensor, ...]]


class Inputs:
    """Inputs of one call that is running."""

    __slots__ = ("_aliases", "_constants", "_containers", "_first_node", "_places")

    def __init__(self) -> None:
        self._aliases: dict[int, tuple[torch.Tensor, torch.Tensor, int, Any]] = {}
        """Tensor, its alias, the version of their memory and the alias's node, by the tensor's `id`."""
        self._constants: list[torch.Tensor] = []
        """Tensors that need no gradient."""
        self._containers: list[Any] = []
        """Outermost lists and dicts."""
        self._places: list[tuple[Any, Any, Any, Any]] = []
        """List or dict, index or key, what the module finds there and what the caller does."""
        self._first_node = 0
        """Number of the first autograd node of the call."""

    def replace(self, args: Any, kwargs: Any, alias: Alias | None) -> tuple[Any, Any]:
        """Return the arguments with an alias in place of each tensor that needs a gradient; `alias` None =
        with the tensors themselves."""
        wanted: dict[int, torch.Tensor] = {}
        for value in (*args, *kwargs.values()):
            self._find(value, wanted)
        self._first_node = torch._C._autograd._get_sequence_nr()
        if not wanted or alias is None:
            return args, kwargs
        for tensor, fresh in zip(wanted.values(), alias(*wanted.values()), strict=True):
            self._aliases[id(tensor)] = tensor, fresh, fresh._version, fresh.grad_fn
        return (
            tuple(self._replaced(value) for value in args),
            {name: self._replaced(value) for name, value in kwargs.items()},
        )

    def finish(self) -> Iterator[torch.Tensor]:
        """Give the caller its lists, dicts and tensors back; yield the tensors that the module wrote or put
        into them."""
        for container, place, fresh, before in self._places:
            try:
                if container[place] is fresh:
                    container[place] = before
            except (IndexError, KeyError):
                continue  # the module removed it
        for tensor, fresh, version, node in self._aliases.values():
            if fresh._version != version and fresh.grad_fn is not node:
                with grad_mode._unsafe_preserve_version_counter(tensor):
                    tensor.copy_(fresh)  # the values are there already
                _ = tensor.grad_fn  # gives a view its new node, without which `register_hook` would crash
                yield fresh
        for tensor in self._constants:
            if tensor.requires_grad:
                yield tensor
        for container in self._containers:
            for tensor in tensors_with_grad(container):
                if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= self._first_node:
                    yield tensor
        for kept in (self._aliases, self._constants, self._containers, self._places):
            kept.clear()

    def _find(self, tree: Any, wanted: dict[int, torch.Tensor], *, is_outermost: bool = True) -> None:
        if isinstance(tree, torch.Tensor):
            if tree.requires_grad:
                wanted[id(tree)] = tree
            else:
                self._constants.append(tree)
            return
        is_mutable = isinstance(tree, (list, dict, deque))
        if is_mutable and is_outermost:
            self._containers.append(tree)
        if is_mutable or isinstance(tree, tuple):
            for child in tree.values() if isinstance(tree, dict) else tree:
                self._find(child, wanted, is_outermost=is_outermost and not is_mutable)

    def _replaced(self, tree: Any) -> Any:
        """Return what the module gets for an argument. Other objects than these, which may hold tensors, are
        passed on as they are: a copy would not see what the module changes."""
        if isinstance(tree, torch.Tensor):
            found = self._aliases.get(id(tree))
            return tree if found is None else found[1]
        if isinstance(tree, (list, dict, deque)):
            for place, child in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
                if (fresh := self._replaced(child)) is not child:
                    tree[place] = fresh
                    self._places.append((tree, place, fresh, child))
        elif type(tree) is tuple or hasattr(tree, "_fields"):
            children = [self._replaced(child) for child in tree]
            if any(fresh is not child for fresh, child in zip(children, tree, strict=True)):
                make: Callable[[Any], Any] = getattr(tree, "_make", tuple)
                return make(children)
        return tree
