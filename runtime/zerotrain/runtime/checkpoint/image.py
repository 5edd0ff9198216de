"""The state that one rank stores at one moment: the contents of its file and everything that the manifest
says.

`Image.of` refers to the engine's streams and takes the rest (scalars, client state, random generators) by
value; `detached` copies the streams too, so that training may go on while the copy is written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zerotrain.contract.strict_json import MAX_DEPTH, strict_json
from zerotrain.runtime.checkpoint import rng
from zerotrain.runtime.checkpoint.files import json_bytes
from zerotrain.runtime.checkpoint.intervals import stored_pieces
from zerotrain.runtime.checkpoint.manifest import FileEntry, Manifest, TensorEntry, UnitEntry
from zerotrain.runtime.checkpoint.names import BUFFER_PREFIX, EXTRA_STATE, MAX_MANIFEST_BYTES
from zerotrain.runtime.checkpoint.packing import pack
from zerotrain.runtime.checkpoint.staging import Staging
from zerotrain.runtime.checkpoint.stepfolder import StepFolder
from zerotrain.runtime.checkpoint.tensorfile import Content, dtype_name, file_size
from zerotrain.runtime.zero.layout import ModelLayout, UnitLayout
from zerotrain.runtime.zero.state import CheckpointState

_STATE_DEPTH = MAX_DEPTH - 8
"""Greatest nesting of a user's state within the manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """One rank's part of a checkpoint."""

    layout: ModelLayout
    rank: int
    tensors: Mapping[str, Content]
    """Contents by key of the rank's file."""
    kinds: Mapping[str, Mapping[str, str]]
    """Dtypes by unit and state kind."""
    rng: Mapping[str, Any]
    """Scalar part of the rank's random generators."""
    scalars: Mapping[str, Any]
    client_state: Mapping[str, Any]
    buffers: tuple[str, ...]

    @classmethod
    def of(cls, state: CheckpointState, client_state: Mapping[str, Any]) -> Image:
        """Take the present state. Raises ValueError or TypeError, with the name, where it has no durable
        form."""
        tensors: dict[str, Content] = {}
        kinds: dict[str, dict[str, str]] = {}
        for (unit, kind), stream in sorted(state.streams.items(), key=lambda item: item[0]):
            expected = state.layout.shard_numel(unit)
            if stream.numel != expected:
                raise ValueError(f"stream {unit}/{kind} must have {expected} elements; it has {stream.numel}")
            tensors[f"{unit}/{kind}"] = stream
            kinds.setdefault(unit, {})[kind] = dtype_name(stream, kind)
        if state.rank == 0:
            tensors |= {f"{BUFFER_PREFIX}{fqn}": state.stored_buffer(fqn) for fqn in sorted(state.buffers)}
        generators, rng_scalars = rng.capture()
        tensors |= generators
        client = pack(client_state, "client_state")
        extra = pack(state.extra, EXTRA_STATE)
        if state.rank == 0:
            tensors |= client.tensors | extra.tensors
        for key, tensor in tensors.items():
            dtype_name(tensor, key)
        scalars = state.scalars | ({EXTRA_STATE: extra.json} if state.extra else {})
        return cls(
            layout=state.layout,
            rank=state.rank,
            tensors=tensors,
            kinds=kinds,
            rng=rng_scalars,
            scalars=_by_value("scalars", scalars),
            client_state=_by_value("client_state", client.json),
            buffers=tuple(sorted(state.buffers)),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the rank's file."""
        return file_size(self.tensors)

    def detached(self, staging: Staging) -> Image:
        """Return the same image with copies of the contents, in `staging`."""
        return replace(self, tensors=staging.copies(self.tensors))

    def manifest(self, files: tuple[FileEntry, ...], folder: StepFolder) -> Manifest:
        """Return the manifest that rank 0 writes. Units without a stream, and their parameters, are left
        out."""
        layout = self.layout
        pieces = stored_pieces(layout)
        stored = [unit for unit in layout.units if unit.name in self.kinds]
        tensors = {
            segment.fqn: TensorEntry(unit=unit.name, shape=segment.shape, pieces=pieces[segment.fqn])
            for unit in stored
            for segment in unit.segments
        }
        return Manifest(
            step=folder.step,
            attempt=folder.owner.attempt,
            job_uid=folder.owner.job_uid,
            created_at=time.time(),
            world_size=layout.world_size,
            align=layout.align,
            files=files,
            units={unit.name: self._unit_entry(unit) for unit in stored},
            tensors=tensors,
            aliases={alias: owner for alias, owner in layout.aliases.items() if owner in tensors},
            buffers=self.buffers,
            scalars=self.scalars,
            client_state=self.client_state,
        )

    def _unit_entry(self, unit: UnitLayout) -> UnitEntry:
        return UnitEntry(trainable=unit.trainable, kinds=self.kinds[unit.name])


def check_values(client_state: Any, extra: Mapping[str, Any]) -> None:
    """Raise ValueError for a client state or an extra state of a module that has no durable form."""
    if not isinstance(client_state, Mapping):
        raise ValueError(
            f"client_state must be a dictionary; got {type(client_state).__name__}: pass {{'state': ...}}"
        )
    _by_value("client_state", pack(client_state, "client_state").json)
    _by_value(EXTRA_STATE, pack(extra, EXTRA_STATE).json)


def _by_value(what: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as they come back from JSON. Raises ValueError where they would not."""
    try:
        copy: dict[str, Any] = strict_json(
            json_bytes(values), max_bytes=MAX_MANIFEST_BYTES, max_depth=_STATE_DEPTH
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{what} cannot be written as JSON ({error}); make it smaller or flatter") from error
    return copy
