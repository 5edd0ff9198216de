"""A folder of weights during its writing: files are filled under temporary names, and appear atomically.

The first rank `create`s the files with their headers and full length; every rank `write`s its intervals; the
first rank `commit`s. Readers start from one file, the index or the only weights file, and it is replaced
last, by one rename; so a reader, or a crash at any point, finds the old weights or the new ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from zerotrain.runtime.checkpoint.files import (
    fsync_folder,
    remove_any,
    remove_tree,
    replace_durable,
    write_durable,
)
from zerotrain.runtime.checkpoint.tensorfile import TILE_BYTES
from zerotrain.runtime.weights.files import INDEX, SINGLE
from zerotrain.runtime.weights.plan import ExportTensor, file_names, index_json, plan_files

TEMPORARY = ".tmp-weights"

_SHARD = re.compile(r"model(-v\d+)?-\d{5}-of-\d{5}\.safetensors")
"""Names that `file_names` makes; other files in the folder do not belong to an export."""


class WeightFolder:
    """One export into `directory`, which may hold other files and an older export."""

    def __init__(
        self,
        directory: Path,
        tensors: Sequence[ExportTensor],
        *,
        max_bytes: int,
        aliases: Mapping[str, str],
        single: str = SINGLE,
    ) -> None:
        """`single` is the file's name when there is only one."""
        self.directory = directory
        self.num_bytes = sum(tensor.num_bytes for tensor in tensors)
        self._single = single
        self._files = plan_files(tensors, max_bytes=max_bytes, aliases=aliases)
        self._place = {
            name: (number, offset)
            for number, file in enumerate(self._files)
            for name, offset in file.offsets.items()
        }
        self._dtypes = {tensor.name: tensor.dtype for tensor in tensors}
        self._open: dict[int, int] = {}

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for file in self._files)

    def create(self) -> None:
        """Make the temporary files, of full length so that a full disk is detected now. Raises OSError."""
        folder = self.directory / TEMPORARY
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_tree(folder)
        folder.mkdir()
        for number, file in enumerate(self._files):
            with open(self._temporary(number), "wb") as handle:
                os.posix_fallocate(handle.fileno(), 0, file.num_bytes)
                handle.write(file.header)

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Store 1-D `values` as elements `[start, ...)` of a tensor, cast tile by tile. Raises OSError."""
        number, offset = self._place[name]
        if number not in self._open:
            self._open[number] = os.open(self._temporary(number), os.O_WRONLY | os.O_CLOEXEC)
        dtype = self._dtypes[name]
        tile = TILE_BYTES // max(dtype.itemsize, values.dtype.itemsize)
        for first in range(0, values.numel(), tile):
            part = values[first : first + tile].detach().to(dtype).cpu().contiguous()
            _write_at(self._open[number], part, offset + (start + first) * dtype.itemsize)

    def sync(self) -> None:
        """Make the data that this process wrote durable, and close the files. Raises OSError."""
        for descriptor in self._open.values():
            os.fsync(descriptor)
        self.close()

    def close(self) -> None:
        """Close the files without syncing them."""
        while self._open:
            os.close(self._open.popitem()[1])

    def commit(self, companions: Mapping[str, Path | bytes]) -> None:
        """Replace the old weights by the new ones. Raises OSError.

        `companions` (config.json, tokenizer: name -> contents or a file to copy) are written before the
        weights.
        """
        for name, source in companions.items():
            replace_durable(
                self.directory / name, source if isinstance(source, bytes) else source.read_bytes()
            )
        single = self.directory / self._single
        old = self._weights_there()
        if len(self._files) == 1:
            os.replace(self._temporary(0), single)
            kept = {single.name}
        else:
            names = self._free_names(old)
            for number, name in enumerate(names):
                os.replace(self._temporary(number), self.directory / name)
            fsync_folder(self.directory)
            index = index_json(zip(names, self._files, strict=True), num_bytes=self.num_bytes)
            write_durable(self.directory / TEMPORARY / INDEX, index)
            os.replace(self.directory / TEMPORARY / INDEX, self.directory / INDEX)
            kept = {INDEX, *names}
        fsync_folder(self.directory)
        for name in sorted(old - kept, key=lambda name: name != SINGLE):  # readers prefer the only file
            remove_any(self.directory / name)
        remove_tree(self.directory / TEMPORARY)

    def discard(self) -> None:
        """Remove the temporary files."""
        remove_tree(self.directory / TEMPORARY)

    def _weights_there(self) -> set[str]:
        """Return the files of an older export; none if this export has a file name of its own."""
        if self._single != SINGLE:
            return set()
        shards = {path.name for path in self.directory.iterdir() if _SHARD.fullmatch(path.name)}
        return shards | {name for name in (SINGLE, INDEX) if (self.directory / name).exists()}

    def _free_names(self, old: set[str]) -> tuple[str, ...]:
        names = file_names(len(self._files))
        number = 2
        while old.intersection(names):  # the old index still points to them
            names = file_names(len(self._files), stem=f"model-v{number}")
            number += 1
        return names

    def _temporary(self, number: int) -> Path:
        return self.directory / TEMPORARY / f"{number:05d}.safetensors"


def _write_at(descriptor: int, part: torch.Tensor, position: int) -> None:
    view = part.view(torch.uint8).numpy().data
    while view.nbytes:
        count = os.pwrite(descriptor, view, position)
        view, position = view[count:], position + count
