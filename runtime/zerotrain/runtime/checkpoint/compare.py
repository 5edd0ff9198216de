"""Comparison of two checkpoints by element, whatever ranks wrote them: `zerotrain checkpoint diff`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zerotrain.runtime.checkpoint.inspect import read_manifest
from zerotrain.runtime.checkpoint.intervals import intersect
from zerotrain.runtime.checkpoint.manifest import Manifest
from zerotrain.runtime.checkpoint.names import BUFFER_PREFIX
from zerotrain.runtime.checkpoint.tensorfile import TensorFile

TILE_NUMEL = 1 << 20
"""Number of elements that are compared at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Comparison of one state of one parameter (or a buffer, kind "buffer") in both checkpoints."""

    fqn: str
    kind: str
    numel: int
    differing: int
    """Number of elements whose values differ."""
    max_abs: float
    """Largest absolute difference; NaN when one side is NaN where the other is not."""
    note: str = ""
    """Reason why the state cannot be compared: on one side alone, other shapes."""

    @property
    def is_equal(self) -> bool:
        return self.differing == 0 and not self.note


class Side:
    """One of the two checkpoints, with its files open."""

    def __init__(self, path: Path) -> None:
        """Open the checkpoint. Raises OSError or ValueError."""
        self.manifest: Manifest = read_manifest(path)
        self.files = [TensorFile(path / entry.name) for entry in self.manifest.files]

    def close(self) -> None:
        for file in self.files:
            file.close()

    def kinds(self, fqn: str) -> dict[str, str]:
        return dict(self.manifest.units[self.manifest.tensors[fqn].unit].kinds)

    def read(self, fqn: str, kind: str, start: int, stop: int) -> torch.Tensor:
        """Return elements `[start, stop)` in the stored dtype."""
        entry = self.manifest.tensors[fqn]
        key = f"{entry.unit}/{kind}"
        parts = [
            self.files[copy.file].part(key, copy.source, copy.length)
            for copy in intersect(entry.pieces, start, stop, target=0)
        ]
        return torch.cat(parts)


def differences(left: Side, right: Side) -> Iterator[Difference]:
    """Yield every state of every parameter and buffer of both, in the left one's order. Raises OSError and
    ValueError."""
    ours, theirs = left.manifest.tensors, right.manifest.tensors
    for fqn in [*ours, *(name for name in theirs if name not in ours)]:
        if fqn not in ours or fqn not in theirs:
            yield _alone(fqn, "*", is_left=fqn in ours)
            continue
        if ours[fqn].shape != theirs[fqn].shape:
            note = f"shape {list(ours[fqn].shape)} against {list(theirs[fqn].shape)}"
            yield Difference(fqn=fqn, kind="*", numel=0, differing=0, max_abs=0.0, note=note)
            continue
        kinds = left.kinds(fqn)
        for kind in [*kinds, *(name for name in right.kinds(fqn) if name not in kinds)]:
            if kind in kinds and kind in right.kinds(fqn):
                yield _compared(left, right, fqn, kind)
            else:
                yield _alone(fqn, kind, is_left=kind in kinds)
    for fqn in sorted({*left.manifest.buffers, *right.manifest.buffers}):
        if fqn in left.manifest.buffers and fqn in right.manifest.buffers:
            key = f"{BUFFER_PREFIX}{fqn}"
            yield _of_tensors(fqn, "buffer", [(left.files[0].read(key), right.files[0].read(key))])
        else:
            yield _alone(fqn, "buffer", is_left=fqn in left.manifest.buffers)


def _compared(left: Side, right: Side, fqn: str, kind: str) -> Difference:
    numel = math.prod(left.manifest.tensors[fqn].shape)
    tiles = (
        (left.read(fqn, kind, start, stop), right.read(fqn, kind, start, stop))
        for start in range(0, numel, TILE_NUMEL)
        for stop in (min(start + TILE_NUMEL, numel),)
    )
    return _of_tensors(fqn, kind, tiles)


def _of_tensors(
    fqn: str,
    kind: str,
    pairs: Iterator[tuple[torch.Tensor, torch.Tensor]] | Sequence[tuple[torch.Tensor, ...]],
) -> Difference:
    numel = differing = 0
    largest = 0.0
    for ours, theirs in pairs:
        if ours.shape != theirs.shape or ours.is_complex() != theirs.is_complex():
            note = f"shape {list(ours.shape)} against {list(theirs.shape)}"
            if ours.shape == theirs.shape:
                note = f"{ours.dtype} against {theirs.dtype}"
            return Difference(fqn=fqn, kind=kind, numel=0, differing=0, max_abs=0.0, note=note)
        numel += ours.numel()
        left, right = _numbers(ours), _numbers(theirs)
        both_nan = left.isnan() & right.isnan()
        # Equal infinities have no difference that could be computed.
        gap = (left - right).abs().masked_fill((left == right) | both_nan, 0.0)
        differing += int((gap != 0).sum())
        if gap.numel():
            top = float(gap.max())
            largest = math.nan if math.isnan(top) or math.isnan(largest) else max(largest, top)
    return Difference(fqn=fqn, kind=kind, numel=numel, differing=differing, max_abs=largest)


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """Return values as fp64: complex numbers as pairs, a dtype without arithmetic as its bytes."""
    if values.is_complex():
        return torch.view_as_real(values).double()
    return (values.view(torch.uint8) if values.dtype is torch.float4_e2m1fn_x2 else values).double()


def _alone(fqn: str, kind: str, *, is_left: bool) -> Difference:
    note = f"only in the {'first' if is_left else 'second'}"
    return Difference(fqn=fqn, kind=kind, numel=0, differing=0, max_abs=0.0, note=note)
