"""The manifest of one checkpoint: positions of elements in files, digests, and all scalar state.

Written by rank 0 after every rank's file is durable; the reader trusts only what is in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from zerotrain.runtime.checkpoint.intervals import Piece, check_coverage
from zerotrain.runtime.checkpoint.rawfile import DTYPE_BYTES
from zerotrain.runtime.checkpoint.schema import Node, SchemaError, integer

FORMAT = "zerotrain-checkpoint"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One rank's tensor file; the index in the manifest's list is the rank."""

    name: str
    size: int
    sha256: str
    rng: Mapping[str, Any] = field(default_factory=dict)
    """Scalar part of the rank's random generators."""

    @classmethod
    def parse(cls, node: Node) -> FileEntry:
        entry = cls(
            name=node.text("name"),
            size=node.integer("size"),
            sha256=node.text("sha256"),
            rng=node.mapping("rng"),
        )
        node.done()
        if PurePosixPath(entry.name).name != entry.name or entry.name.startswith("."):
            raise SchemaError(f"{node.path}.name must be a plain file name; got {entry.name!r}")
        return entry


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitEntry:
    """The stored kinds of one unit; the key of the tensors in the files is `<unit>/<kind>`."""

    trainable: bool
    kinds: Mapping[str, str]
    """State kind -> dtype as in DTYPE_BYTES."""

    @classmethod
    def parse(cls, node: Node) -> UnitEntry:
        entry = cls(trainable=node.flag("trainable"), kinds=node.texts("kinds"))
        node.done()
        unknown = sorted(set(entry.kinds.values()) - set(DTYPE_BYTES))
        if unknown:
            raise SchemaError(f"{node.path}.kinds has unknown dtype {unknown[0]!r}")
        return entry


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One parameter: full shape and the pieces that hold it, in element order."""

    unit: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def parse(cls, node: Node, num_files: int) -> TensorEntry:
        unit, shape = node.text("unit"), node.integers("shape")
        pieces = tuple(
            _piece(item, f"{node.path}.pieces[{index}]", num_files)
            for index, item in enumerate(node.items("pieces"))
        )
        node.done()
        try:
            check_coverage(node.path, math.prod(shape), pieces)
        except ValueError as error:
            raise SchemaError(str(error)) from error
        return cls(unit=unit, shape=shape, pieces=pieces)

    def to_json(self) -> dict[str, Any]:
        pieces = [[piece.file, piece.offset, piece.start, piece.length] for piece in self.pieces]
        return {"unit": self.unit, "shape": list(self.shape), "pieces": pieces}


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The record of one checkpoint: everything except the tensors' bytes."""

    step: int
    attempt: int
    job_uid: str
    created_at: float
    """Time of creation in Unix seconds."""
    world_size: int
    """Number of ranks that wrote the checkpoint, which is the number of files."""
    align: int
    files: tuple[FileEntry, ...]
    units: Mapping[str, UnitEntry]
    tensors: Mapping[str, TensorEntry]
    aliases: Mapping[str, str]
    buffers: tuple[str, ...]
    """Names of the buffers, stored whole under the key `buffer/<fqn>` of file 0."""
    scalars: Mapping[str, Any]
    client_state: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the file."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "attempt": self.attempt,
            "job_uid": self.job_uid,
            "created_at": self.created_at,
            "world_size": self.world_size,
            "align": self.align,
            "files": [asdict(entry) for entry in self.files],
            "units": {name: asdict(entry) for name, entry in self.units.items()},
            "tensors": {fqn: entry.to_json() for fqn, entry in self.tensors.items()},
            "aliases": dict(self.aliases),
            "buffers": list(self.buffers),
            "scalars": dict(self.scalars),
            "client_state": dict(self.client_state),
        }

    @classmethod
    def parse(cls, value: object) -> Manifest:
        """Read a manifest. Raises SchemaError naming the first missing, unknown, mistyped or contradictory
        value."""
        node = Node(value, "manifest")
        kind, version = node.text("format"), node.integer("version")
        if (kind, version) != (FORMAT, VERSION):
            raise SchemaError(
                f"manifest is {kind!r} version {version}; this version reads {FORMAT!r} version {VERSION}"
            )
        files = tuple(
            FileEntry.parse(Node(item, f"manifest.files[{index}]"))
            for index, item in enumerate(node.items("files"))
        )
        manifest = cls(
            step=node.integer("step"),
            attempt=node.integer("attempt"),
            job_uid=node.text("job_uid"),
            created_at=node.number("created_at"),
            world_size=node.integer("world_size", low=1),
            align=node.integer("align", low=1),
            files=files,
            units={
                name: UnitEntry.parse(Node(item, f"manifest.units.{name}"))
                for name, item in node.mapping("units").items()
            },
            tensors={
                fqn: TensorEntry.parse(Node(item, f"manifest.tensors.{fqn}"), len(files))
                for fqn, item in node.mapping("tensors").items()
            },
            aliases=node.texts("aliases"),
            buffers=_texts(node.items("buffers")),
            scalars=node.mapping("scalars"),
            client_state=node.mapping("client_state"),
        )
        node.done()
        manifest._check()
        return manifest

    def _check(self) -> None:
        if len(self.files) != self.world_size:
            raise SchemaError(f"manifest.files has {len(self.files)} entries for {self.world_size} ranks")
        for fqn, entry in self.tensors.items():
            if entry.unit not in self.units:
                raise SchemaError(f"manifest.tensors.{fqn}.unit {entry.unit!r} is not in manifest.units")
        for alias, owner in self.aliases.items():
            if owner not in self.tensors:
                raise SchemaError(
                    f"manifest.aliases.{alias} names {owner!r}, which is not in manifest.tensors"
                )


def _piece(value: object, path: str, num_files: int) -> Piece:
    if not isinstance(value, list) or len(value) != 4:
        raise SchemaError(f"{path} must be [file, offset, start, length]; got {value!r}")
    file, offset, start, length = (integer(item, path) for item in value)
    if file >= num_files:
        raise SchemaError(f"{path} names file {file} of {num_files}")
    return Piece(file=file, offset=offset, start=start, length=length)


def _texts(values: list[Any]) -> tuple[str, ...]:
    for value in values:
        if not isinstance(value, str):
            raise SchemaError(f"manifest.buffers must hold names; got {value!r}")
    return tuple(values)
