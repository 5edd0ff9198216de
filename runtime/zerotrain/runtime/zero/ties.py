"""Parameters that are several objects over the same memory, as `a.data = b.data` makes them: refused.

Plain torch updates that memory through each of them. Units copy every parameter into memory of its own, so
the parameters would diverge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from zerotrain.runtime.zero.layout import LayoutError
from zerotrain.runtime.zero.names import named_parameters
from zerotrain.runtime.zero.placeholder import ShardedParameter


@dataclass(frozen=True, slots=True)
class _Region:
    """The elements of a storage that a parameter uses."""

    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def stop(self) -> int:
        return (
            self.offset
            + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
            + 1
        )

    @property
    def is_dense(self) -> bool:
        """Whether every element between the first and the last one belongs to the parameter."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel == self.stop - self.offset

    def overlaps(self, other: _Region) -> bool:
        """Return whether an element is surely in both; two interleaved regions count as disjoint."""
        if (self.offset, self.shape, self.stride) == (other.offset, other.shape, other.stride):
            return True
        if not (self.is_dense or other.is_dense):
            return False
        return self.offset < other.stop and other.offset < self.stop


def refuse_shared_memory(model: nn.Module) -> None:
    """Raise LayoutError if two parameters of the model use the same elements of memory."""
    regions: dict[tuple[int, torch.dtype], list[_Region]] = defaultdict(list)
    for name, parameter in named_parameters(model):
        if parameter.numel() and not isinstance(parameter, ShardedParameter):
            memory = int(parameter.untyped_storage()._cdata)
            region = _Region(
                name, int(parameter.storage_offset()), tuple(parameter.shape), parameter.stride()
            )
            regions[memory, parameter.dtype].append(region)
    for first, second in chain.from_iterable(map(_overlapping, regions.values())):
        raise LayoutError(
            f"parameters {first.name!r} and {second.name!r} are two objects over the same memory (as "
            "`a.data = b.data` makes them), which would come apart in training; tie them by one object: "
            "assign the parameter itself, as in `module.weight = other.weight`"
        )


def _overlapping(regions: list[_Region]) -> Iterator[tuple[_Region, _Region]]:
    in_order = sorted(regions, key=lambda region: region.offset)
    for position, first in enumerate(in_order):
        for second in in_order[position + 1 :]:
            if second.offset >= first.stop:
                break
            if first.overlaps(second):
                yield first, second
