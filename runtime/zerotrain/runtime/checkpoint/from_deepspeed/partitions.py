"""Positions of a parameter's elements in the ranks' files, in DeepSpeed's flat partitions.

Stages 1 and 2 lay the parameters of a group one after another (with `paddings` between them) and cut the
whole, padded at its end, into equal parts, one per rank. Stage 3 cuts every parameter on its own into equal
parts, the last ones padded, and each rank lays its parts one after another. Pure functions; numbers are
elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from zerotrain.runtime.checkpoint.intervals import Piece

Shapes = Mapping[str, tuple[int, ...]]


def flat_pieces(
    shapes: Shapes, *, partition: int, paddings: Sequence[int] | None = None
) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces of each parameter of a group at stages 1 and 2; each rank holds `partition`
    elements."""
    pieces = {}
    start = 0
    for index, (fqn, shape) in enumerate(shapes.items()):
        numel = math.prod(shape)
        pieces[fqn] = tuple(_across(start, numel, partition))
        start += numel + (paddings[index] if paddings else 0)
    return pieces


def _across(start: int, numel: int, partition: int) -> Iterator[Piece]:
    done = 0
    while done < numel:
        rank, offset = divmod(start + done, partition)
        length = min(numel - done, partition - offset)
        yield Piece(file=rank, offset=offset, start=done, length=length)
        done += length


def sharded_pieces(shapes: Shapes, *, world_size: int) -> tuple[dict[str, tuple[Piece, ...]], int]:
    """Return `(pieces of each parameter, elements that each rank must hold)` at stage 3."""
    pieces = {}
    offset = 0
    for fqn, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // world_size)
        pieces[fqn] = tuple(
            Piece(file=rank, offset=offset, start=rank * part, length=min(part, numel - rank * part))
            for rank in range(world_size)
            if rank * part < numel
        )
        offset += part
    return pieces, offset
