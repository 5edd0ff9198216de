"""Layout of tensors in files, to the byte: pure, so that every rank computes the same result."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerotrain.runtime.checkpoint.tensorfile import DTYPE_NAMES, add_entry, padded_header

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportTensor:
    """One tensor as it will be stored."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFile:
    """One safetensors file before its data."""

    header: bytes
    """Length prefix and JSON, padded so that the data starts on a page."""
    offsets: Mapping[str, int]
    """Byte of the file at which each tensor starts."""
    num_bytes: int
    """Size of the whole file."""


def plan_files(
    tensors: Sequence[ExportTensor], *, max_bytes: int, aliases: Mapping[str, str]
) -> tuple[PlannedFile, ...]:
    """Return files of at most `max_bytes` of data (a larger tensor gets a file of its own), in the given
    order.

    `aliases` (tied name -> stored name) go into the header's metadata, where `safetensors.torch.load_model`
    looks for them. Raises ValueError for a dtype that the format does not have.
    """
    groups: list[list[ExportTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.num_bytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.num_bytes
    return tuple(_plan_file(group, aliases) for group in groups)


def file_names(count: int, *, stem: str = "model") -> tuple[str, ...]:
    """Return file names in the scheme of transformers."""
    if count == 1:
        return (f"{stem}.safetensors",)
    return tuple(f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count))


def index_json(files: Iterable[tuple[str, PlannedFile]], *, num_bytes: int) -> bytes:
    """Return the contents of `model.safetensors.index.json`; `num_bytes` of all tensors together."""
    places = {tensor: name for name, file in files for tensor in file.offsets}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(index, indent=2).encode() + b"\n"


def parse_size(text: str | int) -> int:
    """Return the bytes of `5GB`, `200MB`, `1GiB` or a plain number. Raises ValueError."""
    found = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", str(text))
    if found is None or found[2].upper() not in _UNITS or int(found[1]) < 1:
        raise ValueError(f"max_shard_size must be a size such as 5GB, 200MB or 1GiB; got {text!r}")
    return int(found[1]) * _UNITS[found[2].upper()]


def _plan_file(tensors: Sequence[ExportTensor], aliases: Mapping[str, str]) -> PlannedFile:
    known = {tensor.name for tensor in tensors}
    ties = {alias: owner for alias, owner in aliases.items() if owner in known}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **ties}}
    starts: dict[str, int] = {}
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):  # keeps every start aligned
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"tensor {tensor.name!r} has dtype {tensor.dtype}, which safetensors cannot hold"
            )
        starts[tensor.name], end = end, end + tensor.num_bytes
        offsets = (starts[tensor.name], end)
        add_entry(header, tensor.name, dtype=DTYPE_NAMES[tensor.dtype], shape=tensor.shape, offsets=offsets)
    prefix = padded_header(header)
    return PlannedFile(
        header=prefix,
        offsets={name: len(prefix) + start for name, start in starts.items()},
        num_bytes=len(prefix) + end,
    )
