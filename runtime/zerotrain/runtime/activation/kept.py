"""One input of a checkpointed part between its forward pass and its recomputation."""

from __future__ import annotations

import torch

from zerotrain.runtime.activation.arena import ActivationArena, ActivationSlot
from zerotrain.runtime.activation.settings import Settings


def can_move(leaf: object) -> bool:
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
        self._parallel = settings.parallel if settings.is_partitioned else None
        self._slot = self._put(_flat(tensor.detach()), settings, arena)

    def fetch(self) -> torch.Tensor:
        """Return the activation. Collective over the model-parallel group if partitioned, except for the
        first call."""
        original, self._original = self._original, None
        if original is not None:
            return original
        # If this is the slot itself, autograd detects writes into it.
        flat = self._slot.tensor.to(self._device, non_blocking=True)
        if self._parallel is not None:
            flat = self._parallel.all_gather(flat)
        return flat[: self._shape.numel()].as_strided(self._shape, self._strides).requires_grad_()

    def _put(self, flat: torch.Tensor, settings: Settings, arena: ActivationArena) -> ActivationSlot:
        part, numel = flat, flat.numel()
        if self._parallel is not None:
            numel = -(-flat.numel() // self._parallel.world_size)
            start = self._parallel.rank * numel
            part = flat[start : start + numel]  # the last rank's may be shorter, or empty
        device = torch.device("cpu") if settings.in_host_memory else flat.device
        pinned = settings.in_host_memory and flat.device.type == "cuda"
        if settings.contiguous:
            slot = arena.take(numel, dtype=flat.dtype, device=device, pinned=pinned)
        else:
            slot = ActivationSlot(torch.empty(numel, dtype=flat.dtype, device=device, pin_memory=pinned))
        slot.tensor[: part.numel()].copy_(part, non_blocking=True)
        return slot


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))
