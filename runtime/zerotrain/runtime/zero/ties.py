"""Parameters that share memory with another object, as `a.data = b.data` makes them: refused.

Plain torch updates that memory through each of them. Units copy every parameter into memory of its own, so
parameters, and buffers over their memory, would diverge. Buffers may share memory with each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerotrain.runtime.zero.layout import LayoutError
from zerotrain.runtime.zero.names import all_modules, joined, named_parameters
from zerotrain.runtime.zero.placeholder import ShardedParameter


@dataclass(frozen=True, slots=True)
class _Region:
    """The bytes of a storage that a parameter or buffer uses."""

    name: str
    is_buffer: bool
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, *, is_buffer: bool) -> _Region:
        """Return the region of a tensor, whose last dimension are the bytes of an element."""
        size = tensor.itemsize
        return cls(
            name=name,
            is_buffer=is_buffer,
            offset=int(tensor.storage_offset()) * size,
            shape=(*tensor.shape, size),
            stride=(*(step * size for step in tensor.stride()), 1),
        )

    @property
    def stop(self) -> int:
        return (
            self.offset
            + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
            + 1
        )

    @property
    def is_dense(self) -> bool:
        """Whether every byte between the first and the last one belongs to the region."""
        return prod(self.shape) == self.stop - self.offset

    def overlaps(self, other: _Region) -> bool:
        """Return whether a byte is surely in both; two interleaved regions count as disjoint."""
        if (self.offset, self.shape, self.stride) == (other.offset, other.shape, other.stride):
            return True
        if not (self.is_dense or other.is_dense):
            return False
        return self.offset < other.stop and other.offset < self.stop


def refuse_shared_memory(model: nn.Module, *, without: Collection[str] = ()) -> None:
    """Raise LayoutError if two parameters, or a parameter and a buffer, use the same bytes of memory.

    `without`: names of parameters that have no memory yet.
    """
    regions: dict[int, list[_Region]] = defaultdict(list)
    for name, parameter in named_parameters(model):
        if parameter.numel() and name not in without and not isinstance(parameter, ShardedParameter):
            regions[_memory(parameter)].append(_Region.of(name, parameter, is_buffer=False))
    for name, buffer in _plain_buffers(model):
        if (memory := _memory(buffer)) in regions:
            regions[memory].append(_Region.of(name, buffer, is_buffer=True))
    for pair in chain.from_iterable(map(_overlapping, regions.values())):
        first, second = sorted(pair, key=lambda region: region.is_buffer)
        if first.is_buffer:
            continue
        if second.is_buffer:
            raise LayoutError(
                f"buffer {second.name!r} lies in the memory of parameter {first.name!r} (as "
                "`register_buffer(name, weight.data)` makes it), with which it would come apart in training; "
                "if it should follow the parameter, read the parameter itself in forward, if it should keep "
                "the first values, register `weight.detach().clone()`"
            )
        raise LayoutError(
            f"parameters {first.name!r} and {second.name!r} are two objects over the same memory (as "
            "`a.data = b.data` makes them), which would come apart in training; tie them by one object: "
            "assign the parameter itself, as in `module.weight = other.weight`"
        )


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _plain_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that have elements in memory; construct/buffers.py checks the others."""
    for prefix, module in all_modules(model):
        for key, buffer in module._buffers.items():
            if buffer is None or torch.nn.parameter.is_lazy(buffer) or buffer.layout is not torch.strided:
                continue
            is_wrapper: bool = is_traceable_wrapper_subclass(buffer)
            if buffer.numel() and not is_wrapper:
                yield joined(prefix, key), buffer


def _overlapping(regions: list[_Region]) -> Iterator[tuple[_Region, _Region]]:
    in_order = sorted(regions, key=lambda region: region.offset)
    for position, first in enumerate(in_order):
        for second in in_order[position + 1 :]:
            if second.offset >= first.stop:
                break
            if first.overlaps(second):
                yield first, second
