"""One input of a checkpointed part between its forward and its recomputation."""

from __future__ import annotations

import torch

from zerotrain.runtime.activation.arena import Arena, Slot
from zerotrain.runtime.activation.settings import Settings


def can_move(leaf: object) -> bool:
    """Whether an argument is a tensor worth moving: an activation, dense.

    Others stay what they are. What needs no gradient (ids, masks, angles of positions) goes to all parts:
    each part would keep a copy of its own. Slices of larger tensors would free nothing.
    """
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, torch.nn.Parameter):
        return False
    return leaf.requires_grad and leaf.numel() > 0 and is_dense(leaf)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class Kept:
    """An activation that was put elsewhere; `fetch` gives an equal one, with the same strides, back.

    The first `fetch` gives the original itself, to the forward pass.
    """

    def __init__(self, tensor: torch.Tensor, settings: Settings, arena: Arena) -> None:
        """Collective over nothing: every rank cuts its own part out."""
        self._original: torch.Tensor | None = tensor
        self._shape, self._strides = tensor.shape, tensor.stride()
        self._device = tensor.device
        self._parallel = settings.parallel if settings.is_partitioned else None
        self._slot = self._put(_flat(tensor.detach()), settings, arena)

    def fetch(self) -> torch.Tensor:
        """Collective over the model-parallel group when partitioned, but for the first time."""
        original, self._original = self._original, None
        if original is not None:
            return original
        # Where that is the slot itself, autograd guards it against writes.
        flat = self._slot.tensor.to(self._device, non_blocking=True)
        if self._parallel is not None:
            flat = self._parallel.all_gather(flat)
        return flat[: self._shape.numel()].as_strided(self._shape, self._strides).requires_grad_()

    def _put(self, flat: torch.Tensor, settings: Settings, arena: Arena) -> Slot:
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
            slot = Slot(torch.empty(numel, dtype=flat.dtype, device=device, pin_memory=pinned))
        slot.tensor[: part.numel()].copy_(part, non_blocking=True)
        return slot


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
