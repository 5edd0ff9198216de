"""Values that are computed when they are read: tensors of files, and what loaders make of them by stacking,
joining, cutting and casting.

An expression answers for any interval of its flattened elements, so that a rank reads the bytes of its own
share alone, through any chain of these operations. For other operations one tensor is computed as a whole at
each read, and nothing is kept.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from zerotrain.runtime.zero.strided import flat

TILE_BYTES = 8 << 20
"""Bytes of a tile that is cast or compared."""


class Expression(ABC):
    """Values of one tensor. Local: no collective."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, *, is_ranged: bool) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.is_ranged = is_ranged
        """Whether an interval can be read without the rest."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def read(self, start: int, target: torch.Tensor) -> None:
        """Fill 1-D `target` with elements `[start, start + target.numel())` of the flattened tensor, cast
        from the expression's dtype to the target's."""
        if self.is_ranged:
            self._read_range(start, target)
        else:
            target.copy_(flat(self._compute())[start : start + target.numel()])

    def whole(self) -> torch.Tensor:
        """Return all values as a host tensor of its own, contiguous memory."""
        if not self.is_ranged:
            return self._compute().detach().contiguous()
        values = torch.empty(self.shape, dtype=self.dtype)
        self._read_range(0, values.view(-1))
        return values

    @abstractmethod
    def _read_range(self, start: int, target: torch.Tensor) -> None:
        """Do `read` of an expression that is ranged."""

    @abstractmethod
    def _compute(self) -> torch.Tensor:
        """Return all values of an expression that is not ranged, in memory that nothing else uses."""


class Leaf(Expression):
    """Values that can be read by intervals, and are made of no other expression."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype, is_ranged=True)

    def _compute(self) -> torch.Tensor:
        raise AssertionError("it is ranged")


class Result(Expression):
    """Values that are computed as a whole at each read."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype, is_ranged=False)

    def _read_range(self, start: int, target: torch.Tensor) -> None:
        raise AssertionError("it is not ranged")


class Held(Leaf):
    """Values of a tensor in memory."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(values.shape, values.dtype)
        self._values = values.detach()

    def _read_range(self, start: int, target: torch.Tensor) -> None:
        target.copy_(flat(self._values)[start : start + target.numel()])


class Cast(Expression):
    """Values of another expression, rounded to a dtype."""

    def __init__(self, inner: Expression, dtype: torch.dtype) -> None:
        super().__init__(inner.shape, dtype, is_ranged=inner.is_ranged)
        self._inner = inner

    def _read_range(self, start: int, target: torch.Tensor) -> None:
        if target.dtype == self.dtype:
            self._inner.read(start, target)
            return
        for first, part in _tiles(target, self.dtype):
            rounded = torch.empty(part.numel(), dtype=self.dtype)
            self._inner.read(start + first, rounded)
            part.copy_(rounded)

    def _compute(self) -> torch.Tensor:
        return self._inner.whole().to(self.dtype)


class Reshaped(Expression):
    """The same elements in the same order, in another shape."""

    def __init__(self, inner: Expression, shape: Sequence[int]) -> None:
        super().__init__(shape, inner.dtype, is_ranged=inner.is_ranged)
        self._inner = inner

    def _read_range(self, start: int, target: torch.Tensor) -> None:
        self._inner.read(start, target)

    def _compute(self) -> torch.Tensor:
        return self._inner.whole().reshape(self.shape)


class Joined(Expression):
    """Expressions of one dtype, one after the other along a dimension."""

    def __init__(self, parts: Sequence[Expression], dim: int) -> None:
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        super().__init__(shape, parts[0].dtype, is_ranged=all(part.is_ranged for part in parts))
        self._parts, self._dim = parts, dim
        self._rows = [math.prod(part.shape[dim:]) for part in parts]

    def _read_range(self, start: int, target: torch.Tensor) -> None:
        row, position, stop = sum(self._rows), start, start + target.numel()
        while position < stop:
            index, offset = divmod(position, row)
            place = 0
            while offset >= self._rows[place]:
                offset -= self._rows[place]
                place += 1
            length = min(self._rows[place] - offset, stop - position)
            piece = target[position - start : position - start + length]
            self._parts[place].read(index * self._rows[place] + offset, piece)
            position += length

    def _compute(self) -> torch.Tensor:
        return torch.cat([part.whole() for part in self._parts], dim=self._dim)


class Cut(Expression):
    """Entries `[first, first + length)` of an expression along a dimension."""

    def __init__(self, inner: Expression, dim: int, first: int, length: int) -> None:
        shape = (*inner.shape[:dim], length, *inner.shape[dim + 1 :])
        super().__init__(shape, inner.dtype, is_ranged=inner.is_ranged)
        size = math.prod(inner.shape[dim + 1 :])
        self._inner, self._place = inner, (dim, first, length)
        self._row, self._inner_row, self._offset = length * size, inner.shape[dim] * size, first * size

    def _read_range(self, start: int, target: torch.Tensor) -> None:
        position, stop = start, start + target.numel()
        while position < stop:
            index, offset = divmod(position, self._row)
            length = min(self._row - offset, stop - position)
            piece = target[position - start : position - start + length]
            self._inner.read(index * self._inner_row + self._offset + offset, piece)
            position += length

    def _compute(self) -> torch.Tensor:
        return self._inner.whole().narrow(*self._place).clone()


class Permutation(Result):
    """An expression with its dimensions in another order."""

    def __init__(self, inner: Expression, dims: Sequence[int]) -> None:
        super().__init__([inner.shape[dim] for dim in dims], inner.dtype)
        self._inner = inner
        self._dims = tuple(dims)

    def _compute(self) -> torch.Tensor:
        return self._inner.whole().permute(self._dims)


class Computed(Result):
    """A result of any operation on expressions."""

    def __init__(self, output: torch.Tensor, run: Callable[[], Any], place: int) -> None:
        """Make it of a result on the meta device, the operation, and the result's place among its results."""
        super().__init__(output.shape, output.dtype)
        self._run = run
        self._place = place

    def _compute(self) -> torch.Tensor:
        leaves = [leaf for leaf in tree_flatten(self._run())[0] if isinstance(leaf, torch.Tensor)]
        values: torch.Tensor = leaves[self._place].clone()
        return values


def computed(function: Callable[..., Any], args: Any, kwargs: Any, outputs: Any) -> list[Computed]:
    """Return the results of an operation, whose arguments hold expressions where it takes tensors.

    `outputs` are its results on the meta device.
    """

    def run() -> Any:
        real_args, real_kwargs = tree_map_only(Expression, lambda each: each.whole(), (args, kwargs))
        with torch.no_grad():
            return function(*real_args, **real_kwargs)

    leaves = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]
    return [Computed(leaf, run, place) for place, leaf in enumerate(leaves)]


def _tiles(target: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield parts of a 1-D tensor, with the positions at which they begin, each of at most TILE_BYTES in
    `dtype`."""
    size = max(1, TILE_BYTES // dtype.itemsize)
    for first in range(0, target.numel(), size):
        yield first, target[first : first + size]


def equal(first: Expression, second: Expression) -> bool:
    """Return whether two expressions have the same shape and values, holding neither that is ranged."""
    if first.shape != second.shape:
        return False
    first, second = (each if each.is_ranged else Held(each.whole()) for each in (first, second))
    size = max(1, TILE_BYTES // max(first.dtype.itemsize, second.dtype.itemsize))
    for start in range(0, first.numel, size):
        length = min(size, first.numel - start)
        pair = [torch.empty(length, dtype=each.dtype) for each in (first, second)]
        for each, values in zip((first, second), pair, strict=True):
            each.read(start, values)
        if not torch.equal(*pair):
            return False
    return True
