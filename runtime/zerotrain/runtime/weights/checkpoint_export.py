"""Export of a committed checkpoint to weights for other programs, in one process, tile by tile.

Called by `zerotrain checkpoint export` and `zerotrain zero-to-fp32`. It checks every digest first, then reads
the fp32 masters (and frozen weights as stored) from the files of all ranks that wrote them, and holds one
tile in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerotrain.runtime.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointNoSpace
from zerotrain.runtime.checkpoint.files import free_bytes
from zerotrain.runtime.checkpoint.inspect import read_manifest, resolve, verify
from zerotrain.runtime.checkpoint.manifest import Manifest, TensorEntry
from zerotrain.runtime.checkpoint.names import BUFFER_PREFIX, COMMIT, EXTRA_STATE, check_tag, committed
from zerotrain.runtime.checkpoint.packing import tensor_key
from zerotrain.runtime.checkpoint.reader import OpenFiles
from zerotrain.runtime.checkpoint.tensorfile import DTYPES, TILE_BYTES
from zerotrain.runtime.weights.companions import companions_of
from zerotrain.runtime.weights.files import SINGLE
from zerotrain.runtime.weights.folder import WeightFolder
from zerotrain.runtime.weights.plan import ExportTensor
from zerotrain.runtime.zero.state import MASTER, PARAM


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Options of an export."""

    checkpoint: Path
    """A step folder, or the folder that holds several."""
    output: Path
    """A folder, or one file `*.safetensors`."""
    dtype: torch.dtype
    max_bytes: int
    tag: str | None = None
    """Name of the step folder; the newest unless given."""
    exclude_frozen: bool = False
    every_name: bool = False
    """Whether to store tied parameters under each of their names, which plain `load_state_dict` needs."""
    model: Path | None = None
    """Folder whose config.json and tokenizer are put beside the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """Result of an export."""

    checkpoint: Path
    step: int
    num_tensors: int
    num_bytes: int


def export_checkpoint(request: Request) -> Exported:
    """Write the weights. Raises CheckpointError, OSError or ValueError; the output is complete or
    unchanged."""
    path = find_checkpoint(request.checkpoint, request.tag)
    manifest = _checked_manifest(path)
    is_file = request.output.suffix == ".safetensors"
    directory = request.output.parent if is_file else request.output
    with OpenFiles(manifest, path) as files:
        pieces = _Pieces(manifest, path, files)
        tensors = list(_tensors(manifest, pieces, request))
        if not tensors:
            raise CheckpointError(f"{path} holds nothing to export with these options")
        target = WeightFolder(
            directory,
            tensors,
            max_bytes=1 << 62 if is_file else request.max_bytes,
            aliases=manifest.aliases,
            single=request.output.name if is_file else SINGLE,
        )
        _check_free_space(directory, target.total_bytes)
        try:
            target.create()
            for tensor in tensors:
                pieces.copy(tensor, target)
            target.sync()
            companions = {} if is_file else companions_of(request.model, None, request.dtype)
            target.commit(companions)
        except BaseException:
            target.close()
            target.discard()
            raise
    return Exported(
        checkpoint=path, step=manifest.step, num_tensors=len(tensors), num_bytes=target.total_bytes
    )


def find_checkpoint(directory: Path, tag: str | None = None) -> Path:
    """Return the step folder itself, the one named `tag` in it, or the newest. Raises CheckpointError."""
    if tag is not None:
        found = directory / check_tag(tag)
        if not (found / COMMIT).is_file():
            names = ", ".join(item.path.name for item in committed(directory)) or "none"
            raise CheckpointError(f"{directory} holds no checkpoint {tag!r}; it holds: {names}")
        return found
    try:
        return resolve(directory)
    except ValueError as error:
        hint = ""
        if any(directory.glob("**/*zero_pp_rank_*")):
            hint = "; it is DeepSpeed's: run `zerotrain checkpoint import` first"
        raise CheckpointError(f"{error}{hint}") from error


def _checked_manifest(path: Path) -> Manifest:
    problems = verify(path, lambda num_bytes: None)
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise CheckpointDamaged(f"{path} is damaged: {problems[0]}{more}; take another with --tag")
    return read_manifest(path)


def _tensors(manifest: Manifest, pieces: _Pieces, request: Request) -> Iterator[ExportTensor]:
    for name, entry in manifest.tensors.items():
        unit = manifest.units[entry.unit]
        if request.exclude_frozen and not unit.trainable:
            continue
        stored = pieces.dtype(entry)
        dtype = request.dtype if stored.is_floating_point else stored
        aliases = [alias for alias, owner in manifest.aliases.items() if owner == name]
        for each in (name, *(aliases if request.every_name else ())):
            yield ExportTensor(name=each, shape=entry.shape, dtype=dtype)
    for name in (*manifest.buffers, *_extra_tensors(manifest)):
        shape, dtype = pieces.buffer(name)
        yield ExportTensor(name=name, shape=shape, dtype=dtype)


def _extra_tensors(manifest: Manifest) -> dict[str, str]:
    """Return the extra states of modules that are tensors: key in a state dict -> key in the file of rank
    0."""
    stored: Mapping[str, Any] = manifest.scalars.get(EXTRA_STATE, {})
    keys = {name: tensor_key(value) for name, value in stored.items()}
    return {name: key for name, key in keys.items() if key is not None}


def _check_free_space(directory: Path, num_bytes: int) -> None:
    existing = next(folder for folder in (directory, *directory.absolute().parents) if folder.exists())
    free = free_bytes(existing)
    if 0 < free < num_bytes:
        raise CheckpointNoSpace(directory, rank=0, code=28, bytes_needed=num_bytes, bytes_free=free)


class _Pieces:
    """The tensors in the files of a checkpoint."""

    def __init__(self, manifest: Manifest, path: Path, files: OpenFiles) -> None:
        self._manifest = manifest
        self._path = path
        self._files = files
        self._extra = _extra_tensors(manifest)

    def dtype(self, entry: TensorEntry) -> torch.dtype:
        """Return the stored dtype."""
        return DTYPES[self._manifest.units[entry.unit].kinds[self._kind(entry)]]

    def buffer(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a buffer."""
        file, key = self._files[0], self._key(name)
        return file.shape(key), file.dtype(key)

    def copy(self, tensor: ExportTensor, target: WeightFolder) -> None:
        """Copy one tensor in tiles. Raises CheckpointDamaged when a file was cut short."""
        try:
            entry = self._manifest.tensors.get(self._manifest.aliases.get(tensor.name, tensor.name))
            if entry is None:
                target.write(tensor.name, 0, self._files[0].read(self._key(tensor.name)).reshape(-1))
                return
            dtype, key = self.dtype(entry), f"{entry.unit}/{self._kind(entry)}"
            tile = TILE_BYTES // dtype.itemsize
            for piece in entry.pieces:
                for first in range(0, piece.length, tile):
                    part = torch.empty(min(tile, piece.length - first), dtype=dtype)
                    self._files[piece.file].read_into(key, piece.offset + first, part)
                    target.write(tensor.name, piece.start + first, part)
        except ValueError as error:
            raise CheckpointDamaged(f"{self._path} cannot be read: {error}") from error

    def _key(self, name: str) -> str:
        """Return the key of a buffer or an extra state in the file of rank 0."""
        return self._extra.get(name, BUFFER_PREFIX + name)

    def _kind(self, entry: TensorEntry) -> str:
        return MASTER if self._manifest.units[entry.unit].trainable else PARAM
