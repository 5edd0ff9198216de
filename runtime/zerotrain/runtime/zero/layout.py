"""Positions of all parameter elements: units, segments and rank intervals.

A *unit* is one flat 1-D buffer: the trainable (or the frozen) parameters of one module of the model, one
after the other, padded once so that every rank owns the same number of elements. This module holds only the
layout (no tensors, no torch); `plan.py` derives it from a model. The engine allocates by it, the checkpoint
package stores and resizes by it, so it must stay a pure function of (model, unit boundaries, world size).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from math import prod

ALIGN = 2048
"""Number of elements of which a shard is a multiple, so that every 2-byte stream of a shard is a multiple of
4 KiB."""

SEGMENT_ALIGN = 8
"""Alignment of parameters in elements: 16 bytes even in a 2-byte dtype, as matrix kernels prefer. The gaps
hold zeros."""

DTYPE_BYTES: Mapping[str, int] = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp64": 8,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}


class LayoutError(ValueError):
    """The model cannot be laid out as requested, or a name is not part of the layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One parameter inside its unit: elements `[start, start + numel)` of the flat buffer."""

    fqn: str
    start: int
    numel: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitLayout:
    """One flat buffer. `module` is the fqn of the module whose forward and backward bound the unit's life (""
    = root)."""

    name: str
    module: str
    dtype: str
    """Compute dtype of the flat buffer, spelled as in `DTYPE_BYTES`."""
    trainable: bool
    segments: tuple[Segment, ...]
    numel: int
    """Number of elements up to the end of the last segment, alignment gaps included."""
    padded_numel: int
    """Number of elements with padding, a multiple of `world_size * align`."""
    stays_whole: bool = False
    """Whether every rank keeps the weights whole at stage 3 too, because they are small."""

    @property
    def num_bytes(self) -> int:
        return self.padded_numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """All units of one model for one world size."""

    units: tuple[UnitLayout, ...]
    """Units in module order, which is the canonical order of collectives at the step boundary."""
    world_size: int
    align: int = ALIGN
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied parameters: every further fqn -> the fqn of the owner, which is the one that has a segment."""

    @cached_property
    def _by_name(self) -> dict[str, UnitLayout]:
        return {unit.name: unit for unit in self.units}

    @cached_property
    def _by_fqn(self) -> dict[str, tuple[UnitLayout, Segment]]:
        return {segment.fqn: (unit, segment) for unit in self.units for segment in unit.segments}

    def unit(self, name: str) -> UnitLayout:
        """Return the unit of that name. Raises LayoutError if there is none."""
        try:
            return self._by_name[name]
        except KeyError:
            raise LayoutError(f"no unit named {name!r}; the layout has {sorted(self._by_name)}") from None

    def find(self, fqn: str) -> tuple[UnitLayout, Segment]:
        """Return unit and segment that hold a parameter, aliases resolved. Raises LayoutError for an unknown
        fqn."""
        try:
            return self._by_fqn[self.aliases.get(fqn, fqn)]
        except KeyError:
            raise LayoutError(f"no parameter named {fqn!r} in the layout") from None

    def shard_numel(self, unit: UnitLayout | str) -> int:
        """Return the number of elements that each rank owns of a unit."""
        layout = self.unit(unit) if isinstance(unit, str) else unit
        return layout.padded_numel // self.world_size

    def shard_range(self, unit: UnitLayout | str, rank: int) -> tuple[int, int]:
        """Return `(start, stop)` of the elements of a unit's flat buffer that `rank` owns."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank must be in [0, {self.world_size}); got {rank}")
        shard = self.shard_numel(unit)
        return rank * shard, (rank + 1) * shard

    def owned_segments(self, unit: UnitLayout | str, rank: int) -> Iterator[tuple[Segment, int, int]]:
        """Yield `(segment, start, stop)` for each parameter that `rank` owns a part of; unit coordinates."""
        layout = self.unit(unit) if isinstance(unit, str) else unit
        low, high = self.shard_range(layout, rank)
        for segment in layout.segments:
            start, stop = max(low, segment.start), min(high, segment.stop)
            if start < stop:
                yield segment, start, stop

    def fingerprint(self) -> str:
        """Return a hex digest of everything that must agree between ranks for collectives to match."""
        digest = sha256(f"{self.world_size} {self.align}".encode())
        for unit in self.units:
            digest.update(
                f"|{unit.name} {unit.module} {unit.dtype} {unit.trainable} {unit.padded_numel}".encode()
            )
            for segment in unit.segments:
                digest.update(f";{segment.fqn} {segment.start} {segment.shape}".encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterFact:
    """Facts about one parameter that the layout needs; `shape` is the full shape, dtype as in
    `DTYPE_BYTES`."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def build_unit(
    *,
    name: str,
    module: str,
    trainable: bool,
    parameters: Sequence[ParameterFact],
    world_size: int,
    align: int = ALIGN,
    stays_whole: bool = False,
) -> UnitLayout:
    """Lay out parameters of one dtype, one after the other. Raises LayoutError on mixed or unknown dtypes."""
    dtypes = {parameter.dtype for parameter in parameters}
    if len(dtypes) != 1 or not dtypes <= DTYPE_BYTES.keys():
        raise LayoutError(
            f"unit {name!r} must hold one known dtype of {sorted(DTYPE_BYTES)}; got {sorted(dtypes)}"
        )
    segments: list[Segment] = []
    end = 0
    for parameter in parameters:
        numel = prod(parameter.shape)
        start = round_up(end, SEGMENT_ALIGN)
        segments.append(Segment(fqn=parameter.fqn, start=start, numel=numel, shape=parameter.shape))
        end = start + numel
    return UnitLayout(
        name=name,
        module=module,
        dtype=dtypes.pop(),
        trainable=trainable,
        segments=tuple(segments),
        numel=end,
        padded_numel=round_up(max(end, 1), world_size * align),
        stays_whole=stays_whole,
    )
