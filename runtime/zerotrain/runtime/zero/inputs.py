"""Inputs of a module's forward call, which gets aliases of them: the backward pass of the call ends at the
node that makes the aliases.

A module may change what it gets, write into a tensor or add results to a list or dict, and return what it
got. Its caller sees all that as without the engine, also when the module raised: lists and dicts stay the
same objects; a tensor that was written or returned takes the history of its alias, and is returned in its
place, so that what the caller writes into it later counts under every name. An alias that a module keeps in
an attribute is replaced by the caller's tensor for the same reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import combinations
from sys import getrefcount
from typing import Any

import torch
from torch import nn
from torch.autograd import grad_mode

from zerotrain.runtime.zero.attributes import attributes
from zerotrain.runtime.zero.trees import MAX_DEPTH, tensors_with_grad

KEPT_DEPTH = MAX_DEPTH - 3
"""Depth at which the search of an attribute begins: three levels of containers and objects are left."""

Alias = Callable[..., tuple[torch.Tensor, ...]]


class Inputs:
    """Inputs of one call that is running."""

    __slots__ = ("_aliases", "_containers", "_first_node", "_kept", "_originals", "_references")

    def __init__(self) -> None:
        self._aliases: dict[int, tuple[torch.Tensor, torch.Tensor, int, Any]] = {}
        """Tensor, its alias, the version of their memory and the alias's node, by the tensor's `id`."""
        self._kept: list[torch.Tensor] = []
        """Tensors that the module gets as they are."""
        self._containers: list[Any] = []
        """Outermost lists and dicts."""
        self._originals: dict[int, tuple[Any, Any]] = {}
        """Pairs of what the module gets and what the caller gave, by the `id` of the first."""
        self._references: list[int] = []
        """Number of Python references to each alias when the call began."""
        self._first_node = 0
        """Number of the first autograd node of the call."""

    def replace(self, args: Any, kwargs: Any, alias: Alias | None) -> tuple[Any, Any]:
        """Return the arguments with an alias in place of each tensor that needs a gradient; `alias` None =
        with the tensors themselves."""
        wanted: dict[int, torch.Tensor] = {}
        for value in (*args, *kwargs.values()):
            self._find(value, wanted)
        self._first_node = torch._C._autograd._get_sequence_nr()
        if alias is None:
            return args, kwargs
        if len(wanted) > 1 and len(apart := _apart(wanted)) < len(wanted):
            self._kept += [tensor for key, tensor in wanted.items() if key not in apart]
            wanted = apart
        if not wanted:
            return args, kwargs
        for tensor, fresh in zip(wanted.values(), alias(*wanted.values()), strict=True):
            self._aliases[id(tensor)] = tensor, fresh, fresh._version, fresh.grad_fn
            self._originals[id(fresh)] = fresh, tensor
        replaced = (
            tuple(self._replaced(value) for value in args),
            {name: self._replaced(value) for name, value in kwargs.items()},
        )
        self._references = self._count_references()
        return replaced

    def finish(self, output: Any, module: nn.Module, *, with_stored: bool) -> tuple[Any, list[torch.Tensor]]:
        """Give the caller its lists, dicts and tensors back; return the output, in which they replace their
        aliases, as in attributes of the module, and the tensors that the module computed, wherever they
        are; `with_stored`: also those that it stored in attributes (`self.aux_loss = ...`)."""
        computed = list(tensors_with_grad(output))
        returned = self._aliases_in(computed) if self._aliases else ()
        stay = []
        for key, (tensor, fresh, version, node) in self._aliases.items():
            is_written = fresh._version != version and fresh.grad_fn is not node
            if is_written or key in returned:
                if _takes_history(tensor, fresh, must=is_written):
                    computed.append(fresh)
                else:
                    stay.append(fresh)
        if self._originals:
            for container in self._containers:
                self._restored(container)
        if self._originals or with_stored:
            stored = self._restore_attributes(module)
            if with_stored:
                computed += stored
        for fresh in stay:
            del self._originals[id(fresh)]
        if returned:
            output = self._restored(output, is_output=True)
        for tensor in self._kept:
            # What is written into a view is a part of the history of the whole, and not always of the view's.
            whole = tensor if tensor._base is None else tensor._base
            if whole.requires_grad and self._is_new(whole):
                computed.append(whole)
        for container in self._containers:
            computed += [each for each in tensors_with_grad(container) if self._is_new(each)]
        computed += self._wholes_of(computed)
        for kept in (self._aliases, self._kept, self._containers, self._originals):
            kept.clear()
        return output, computed

    def _count_references(self) -> list[int]:
        """Return the number of Python references to each alias. Whatever autograd keeps counts as one, which
        is left out."""
        return [
            getrefcount(fresh) - (fresh._use_count() > 1)  # type: ignore[attr-defined]
            for _, fresh, _, _ in self._aliases.values()
        ]

    def _restore_attributes(self, module: nn.Module) -> list[torch.Tensor]:
        """Replace aliases, and views of them, that modules keep in attributes; return the tensors with a
        history that are attributes then. Lists, dicts and objects in attributes are searched only if somebody
        keeps an alias."""
        has_aliases, stored = bool(self._originals), []
        is_kept = has_aliases and (bool(self._containers) or self._count_references() != self._references)
        for tensor, fresh, _, _ in self._aliases.values():
            if fresh.retains_grad and not tensor.is_leaf:
                tensor.retain_grad()
        for owner, name, value in attributes(module, tensors_only=not is_kept):
            before = self._restored(value, KEPT_DEPTH, is_output=True) if has_aliases else value
            if before is not value:
                owner[name] = before
            if isinstance(before, torch.Tensor) and before.grad_fn is not None:
                stored.append(before)
        return stored

    def _aliases_in(self, tensors: Iterable[torch.Tensor]) -> Collection[int]:
        """Return the `id` of each tensor whose alias, or a view of it, is among the tensors."""
        found = [self._originals.get(id(each if each._base is None else each._base)) for each in tensors]
        return {id(pair[1]) for pair in found if pair is not None}

    def _wholes_of(self, tensors: Iterable[torch.Tensor]) -> Collection[torch.Tensor]:
        """Return the tensors that the call computed of which these are views, as a linear layer's output is
        for an input of three dimensions. Where the caller writes into such a view, gradients go past its
        hooks, to the whole."""
        bases = ((id(each._base), each._base) for each in tensors)
        return {key: whole for key, whole in bases if whole is not None and self._is_new(whole)}.values()

    def _is_new(self, tensor: torch.Tensor) -> bool:
        """Return whether the call computed the tensor's values."""
        node = tensor.grad_fn
        return node is not None and node._sequence_nr() >= self._first_node

    def _find(self, tree: Any, wanted: dict[int, torch.Tensor], *, is_outermost: bool = True) -> None:
        if isinstance(tree, torch.Tensor):
            if tree.requires_grad:
                wanted[id(tree)] = tree
            else:
                self._kept.append(tree)
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
        elif type(tree) is tuple or hasattr(tree, "_fields"):
            children = [self._replaced(child) for child in tree]
            if any(fresh is not child for fresh, child in zip(children, tree, strict=True)):
                make: Callable[[Any], Any] = getattr(tree, "_make", tuple)
                fresh = make(children)
                self._originals[id(fresh)] = fresh, tree
                return fresh
        return tree

    def _restored(self, tree: Any, depth: int = 0, *, is_output: bool = False) -> Any:
        """Return what the caller gets back, wherever the module moved it; in an output also within
        objects."""
        if (found := self._originals.get(id(tree))) is not None:
            return found[1]
        if isinstance(tree, torch.Tensor):
            whole = self._originals.get(id(tree._base))
            return tree if whole is None else tree._view_func(whole[1])  # type: ignore[attr-defined]
        if depth < MAX_DEPTH:
            restored = partial(self._restored, depth=depth + 1, is_output=is_output)
            if isinstance(tree, (list, dict, deque)):
                for place, child in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
                    if (before := restored(child)) is not child:
                        tree[place] = before
            elif type(tree) is tuple or (isinstance(tree, tuple) and hasattr(tree, "_fields")):
                children = [restored(child) for child in tree]
                if any(before is not child for before, child in zip(children, tree, strict=True)):
                    make: Callable[[Any], Any] = getattr(tree, "_make", tuple)
                    return make(children)
            elif is_output and not isinstance(tree, (nn.Module, type)):
                for name, child in list(getattr(tree, "__dict__", {}).items()):
                    if (before := restored(child)) is not child:
                        object.__setattr__(tree, name, before)
        return tree


def _takes_history(tensor: torch.Tensor, fresh: torch.Tensor, *, must: bool) -> bool:
    """Make the alias's history the tensor's, which has the same memory; return whether it is. Nobody may
    write into a leaf or a result of `chunk`, so unless the module did, they need not have it."""
    if not must and tensor.is_leaf:
        return False
    try:
        with grad_mode._unsafe_preserve_version_counter(tensor):
            tensor.copy_(fresh)  # the values are there already
    except RuntimeError:
        if must:
            raise
        return False
    _ = tensor.grad_fn  # gives a view its new node, without which `register_hook` would crash
    return True


def _apart(tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the tensors without those that share elements with others. Aliases of such would be no views of
    each other, and what is written into one would not be in the history of the other."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors.values():
        if tensor.layout is torch.strided:
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    if len(by_storage) == len(tensors):
        return tensors
    shared = {
        id(each)
        for sharing in by_storage.values()
        for left, right in combinations(sharing, 2)
        if _may_overlap(left, right)
        for each in (left, right)
    }
    return {key: tensor for key, tensor in tensors.items() if key not in shared}


def _may_overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether tensors of one storage may have elements in common; exact for slices of a tensor."""
    low, high = sorted((left, right), key=lambda tensor: tensor.storage_offset())
    distance = int(high.storage_offset() - low.storage_offset())
    extent = sum(step * (size - 1) for step, size in zip(low.stride(), low.shape, strict=True))
    if not left.numel() or not right.numel() or distance > extent:
        return False
    if left.stride() != right.stride():
        return True
    return _meet(sorted(zip(low.stride(), low.shape, high.shape, strict=True), reverse=True), distance)


def _meet(dims: Sequence[tuple[int, int, int]], distance: int) -> bool:
    """Return whether two boxes have a place in common. `dims`: stride and both sizes of each dimension, the
    largest stride first; the second box begins at this distance."""
    if not dims:
        return distance == 0
    step, first, second = dims[0]
    if step == 0:
        return _meet(dims[1:], distance)
    low = distance // step
    return any(
        -second < places < first and _meet(dims[1:], distance - places * step) for places in (low, low + 1)
    )
