"""Position of elements in files: pure interval arithmetic between the layout of a save and that of a load.

A *piece* says: elements `[start, start + length)` of a parameter lie at `[offset, offset + length)` of the
1-D tensors `unit/kind` in file `file`. All kinds of a unit share the pieces, because every kind of state is
laid out like the unit itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zerotrain.runtime.zero.layout import ModelLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Part of one parameter inside one file; all numbers are elements."""

    file: int
    offset: int
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Elements `[source, source + length)` of a stored tensor go to `[target, ... + length)` of a shard."""

    file: int
    source: int
    target: int
    length: int


def stored_pieces(layout: ModelLayout) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces of each parameter of `layout` when rank r writes file r."""
    pieces: dict[str, list[Piece]] = {}
    for unit in layout.units:
        for segment in unit.segments:
            pieces.setdefault(segment.fqn, [])
        for rank in range(layout.world_size):
            shard_start, _ = layout.shard_range(unit, rank)
            for segment, start, stop in layout.owned_segments(unit, rank):
                piece = Piece(
                    file=rank,
                    offset=start - shard_start,
                    start=start - segment.start,
                    length=stop - start,
                )
                pieces[segment.fqn].append(piece)
    return {fqn: tuple(parts) for fqn, parts in pieces.items()}


def check_coverage(fqn: str, numel: int, pieces: Sequence[Piece]) -> None:
    """Raise ValueError unless the pieces, in their order, cover every element exactly once."""
    end = 0
    for piece in pieces:
        if piece.start != end or piece.length < 1:
            raise ValueError(
                f"pieces of {fqn!r} leave a gap or overlap at element {end} "
                f"(next piece: [{piece.start}, {piece.stop}))"
            )
        end = piece.stop
    if end != numel:
        raise ValueError(f"pieces of {fqn!r} cover {end} of {numel} elements")


def plan_shard(
    layout: ModelLayout, unit_name: str, rank: int, stored: Mapping[str, Sequence[Piece]]
) -> Iterator[tuple[str, tuple[Copy, ...]]]:
    """Yield `(fqn, copies)` that fill this rank's shard of a unit from the stored pieces.

    Each entry of `stored` has full coverage. When it holds every parameter of the unit the copies cover all
    parameter elements of the shard, and only alignment gaps and padding (zeros by definition) are left out;
    parameters that it lacks are passed over.
    """
    shard_start, _ = layout.shard_range(unit_name, rank)
    for segment, start, stop in layout.owned_segments(unit_name, rank):
        if segment.fqn not in stored:
            continue
        low, high = start - segment.start, stop - segment.start
        yield (
            segment.fqn,
            tuple(intersect(stored[segment.fqn], low, high, target=start - shard_start)),
        )


def within(copies: Iterable[Copy], start: int, stop: int) -> Iterator[Copy]:
    """Yield the parts of the copies whose targets lie in `[start, stop)`; targets count from `start`."""
    for copy in copies:
        low, high = max(start, copy.target), min(stop, copy.target + copy.length)
        if low < high:
            yield Copy(
                file=copy.file,
                source=copy.source + low - copy.target,
                target=low - start,
                length=high - low,
            )


def intersect(pieces: Iterable[Piece], low: int, high: int, *, target: int) -> Iterator[Copy]:
    """Yield copies of the elements `[low, high)` of a parameter from its pieces to `target` on."""
    for piece in pieces:
        start, stop = max(low, piece.start), min(high, piece.stop)
        if start < stop:
            yield Copy(
                file=piece.file,
                source=piece.offset + start - piece.start,
                target=target + start - low,
                length=stop - start,
            )
