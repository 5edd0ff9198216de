"""Access to the memory of tensors of any strides and dtype.

A model may register any tensor as a buffer: expanded and transposed views, lazy conjugates, dtypes without
arithmetic. Copies here move bits, never values: torch has no copy kernel for some dtypes, and a NaN keeps its
payload.
"""

from __future__ import annotations

import torch

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Dtypes that torch can copy, by bytes per element."""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same elements in contiguous memory, detached: the tensor's own memory if that is
    contiguous."""
    if tensor.is_conj() or tensor.is_neg():  # lazy: the memory holds other values
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.detach()
    return tensor if tensor.is_contiguous() else copyable(tensor).contiguous().view(tensor.dtype)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return `plain` as 1-D, of stride 1."""
    values = plain(tensor).view(-1)
    return values.as_strided(values.shape, (1,)) if values.stride(0) != 1 else values  # one expanded element


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return `plain` as 1-D uint8."""
    return flat(tensor).view(torch.uint8)


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory and strides in a dtype that torch can copy."""
    return tensor.view(_SAME_SIZE[tensor.dtype.itemsize])


def expanded_dims(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions along which all elements share memory: those of stride 0."""
    return [
        dim
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if stride == 0 and size > 1
    ]


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the view without the repetitions of `expand`: every dimension of stride 0 has size 1."""
    for dim in expanded_dims(tensor):
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


@torch.no_grad()
def converted(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Convert like `tensor.to`; expanded dimensions stay expanded."""
    values = unexpanded(tensor).to(device=device, dtype=dtype)
    return values if values.shape == tensor.shape else values.expand(tensor.shape)


def shares_memory(tensor: torch.Tensor) -> bool:
    """Return whether some elements must share memory: there are more of them than addresses (`expand`,
    `unfold`)."""
    if tensor.numel() == 0:
        return False
    places = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return places < tensor.numel()


@torch.no_grad()
def holds(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether the memory of `tensor` can hold these values, which have its shape: elements that share
    memory (`expand`, `unfold`) must be equal."""
    if not shares_memory(tensor):
        return True
    trial = torch.empty_strided(tensor.shape, tensor.stride(), dtype=values.dtype, device=values.device)
    overwrite(trial, values)
    return torch.equal(as_bytes(trial), as_bytes(values))


@torch.no_grad()
def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Replace the elements of a tensor for which `holds` is true. The values have its shape and are cast to
    its dtype."""
    target = unexpanded(tensor.detach())
    for dim in expanded_dims(tensor):
        values = values.narrow(dim, 0, 1)
    if target.dtype != values.dtype or target.is_conj() or target.is_neg():
        target.copy_(values)
    else:
        copyable(target).copy_(copyable(plain(values)))
