"""The inputs of a checkpointed part between its forward pass and its recomputation."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, TypeGuard

import torch

from zerotrain.runtime.activation.arena import ActivationArena, ActivationSlot
from zerotrain.runtime.activation.host_copies import Arriving, copies_of
from zerotrain.runtime.activation.settings import Settings


def can_move(leaf: object) -> TypeGuard[torch.Tensor]:
    """Return whether an argument is a tensor worth moving: an activation, dense.

    Others stay where they are. Inputs without gradient (ids, masks, angles of positions) go to all parts, and
    each part would keep its own copy. Slices of larger tensors would free nothing.
    """
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, torch.nn.Parameter):
        return False
    return leaf.requires_grad and leaf.numel() > 0 and is_dense(leaf)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one range of memory, each once, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class Kept:
    """An activation that was moved elsewhere; `fetch` returns an equal tensor with the same strides.

    The first `fetch` returns the original itself, to the forward pass.
    """

    def __init__(self, tensor: torch.Tensor, settings: Settings, arena: ActivationArena) -> None:
        """Move the tensor. No communication: every rank keeps its own part."""
        self._original: torch.Tensor | None = tensor
        self._shape, self._strides = tensor.shape, tensor.stride()
        self._device = tensor.device
        self._copies = copies_of(tensor.device) if settings.in_host_memory else None
        self._arriving: Arriving | None = None
        self._parallel = settings.parallel if settings.is_partitioned else None
        self._slot = self._put(_flat(tensor.detach()), settings, arena)

    def fetch(self) -> torch.Tensor:
        """Return the activation. Collective over the model-parallel group if partitioned, except for the
        first call."""
        original, self._original = self._original, None
        if original is not None:
            return original
        if self._copies is None:
            # If this is the slot itself, autograd detects writes into it.
            flat = self._slot.tensor.to(self._device)
        else:
            self.start_fetch()
            assert self._arriving is not None
            arriving, self._arriving = self._arriving, None
            flat = self._copies.arrived(arriving)
        if self._parallel is not None:
            flat = self._parallel.all_gather(flat)
        return flat[: self._shape.numel()].as_strided(self._shape, self._strides).requires_grad_()

    def start_fetch(self) -> None:
        """Let the activation begin to come back from host memory, where it went to another."""
        if self._copies is not None and self._arriving is None:
            self._arriving = self._copies.fetch(self._slot.tensor)

    def end_part(self) -> None:
        """Make the computation wait until the activation has left."""
        if self._copies is not None:
            self._copies.end_part()

    def _put(self, flat: torch.Tensor, settings: Settings, arena: ActivationArena) -> ActivationSlot:
        part, numel = flat, flat.numel()
        if self._parallel is not None:
            numel = -(-flat.numel() // self._parallel.world_size)
            start = self._parallel.rank * numel
            part = flat[start : start + numel]  # the last rank's may be shorter, or empty
        device = torch.device("cpu") if settings.in_host_memory else flat.device
        pinned = self._copies is not None and flat.device.type == "cuda"
        if settings.contiguous:
            slot = arena.take(numel, dtype=flat.dtype, device=device, pinned=pinned)
        else:
            slot = ActivationSlot(torch.empty(numel, dtype=flat.dtype, device=device, pin_memory=pinned))
        place = slot.tensor[: part.numel()]
        if self._copies is None:
            place.copy_(part)
        else:
            self._copies.send(part, place)
        return slot


class KeptInputs:
    """The inputs of one checkpointed part, of which activations are moved. The first `fetch` is that of the
    forward pass; each later one, of a recomputation, lets the inputs of the part before begin to come
    back."""

    _last_made: ClassVar[weakref.ref[KeptInputs] | None] = None

    def __init__(self, leaves: Sequence[object], settings: Settings, arena: ActivationArena) -> None:
        """Move the activations among the leaves."""
        self.leaves = [Kept(leaf, settings, arena) if can_move(leaf) else leaf for leaf in leaves]
        """The leaves, with a `Kept` in place of each activation."""
        self._is_forward, self._is_back = True, False
        self._before, KeptInputs._last_made = KeptInputs._last_made, weakref.ref(self)

    def fetch(self, leaves: Sequence[object]) -> list[Any]:
        """Return `leaves`, which torch has kept, with the activations in their places."""
        found = [leaf.fetch() if isinstance(leaf, Kept) else leaf for leaf in leaves]
        if self._is_forward:
            self._is_forward = False
            return found
        self._is_back = True
        part = self._next_in_backward()
        for leaf in [] if part is None else part.leaves:
            if isinstance(leaf, Kept):
                leaf.start_fetch()
        return found

    def end_part(self) -> None:
        """Make the computation wait until the activations have left; called when the part has run."""
        for leaf in self.leaves:
            if isinstance(leaf, Kept):
                leaf.end_part()

    def _next_in_backward(self) -> KeptInputs | None:
        """Return the nearest part before this one that was not recomputed; parts within parts are made while
        outer ones are."""
        part: KeptInputs | None = self
        while part is not None and part._is_back:
            part = None if part._before is None else part._before()
        return part


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))
