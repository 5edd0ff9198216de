"""Files in safetensors layout as bytes: header, digest, sizes. Without torch, for the command line.

`tensorfile` reads and writes tensors on top of it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from zerotrain.contract.regular_file import open_regular
from zerotrain.contract.strict_json import JsonError, strict_json

MAX_HEADER_BYTES = 100_000_000
"""Greatest size of a header: the format's own limit."""

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "C64": 8,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "complex128": 16,
    "complex32": 4,
    "float4_e2m1fn_x2": 1,
}
"""Bytes per element of the dtypes that a checkpoint may hold, spelled as in the format or, where that has no
such dtype, as in torch."""

AS_BYTES = frozenset({"complex128", "complex32", "float4_e2m1fn_x2"})
"""Dtypes that the format does not know. Such a tensor of shape S is stored as U8 of shape (*S, bytes per
element), and the metadata has its dtype under METADATA_PREFIX and its key."""

METADATA_PREFIX = "torch_dtype/"

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFile:
    """Size and digest that a written file must have when it is read back."""

    size: int
    sha256: str


def hash_file(path: Path, progress: Callable[[int], object] | None = None) -> WrittenFile:
    """Return a file's present size and digest; `progress` gets the bytes of each chunk. Raises OSError."""
    with os.fdopen(open_regular(path, follow_link=True), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if progress is None:
            return WrittenFile(size=size, sha256=hashlib.file_digest(file, "sha256").hexdigest())
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
        return WrittenFile(size=size, sha256=digest.hexdigest())


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor of a file: its bytes are `[start, stop)` of the file itself."""

    dtype: str
    """Name as in DTYPE_BYTES, or one of the format's that cannot be read here."""
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(descriptor: int) -> dict[str, Entry]:
    """Return every tensor of a file, checked: inside the file, of the size of its shape, without overlap.

    Raises ValueError for anything else, whatever bytes the file holds: it may come from an untrusted source.
    """
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"not a safetensors file: its header claims {length} bytes")
    try:
        header = strict_json(os.pread(descriptor, length, 8), max_bytes=MAX_HEADER_BYTES, unique_keys=True)
    except JsonError as error:
        raise ValueError(f"not a safetensors file: its header {error}") from error
    if not isinstance(header, dict):
        raise ValueError("not a safetensors file: its header is no object")
    metadata = header.pop("__metadata__", None)
    dtypes = metadata if isinstance(metadata, dict) else {}
    entries = {
        key: _entry(
            key,
            value,
            data_start=8 + length,
            size=size,
            packed=dtypes.get(METADATA_PREFIX + key),
        )
        for key, value in header.items()
    }
    in_order = sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop))
    for (before, first), (after, second) in pairwise(in_order):
        if second.start < first.stop:
            raise ValueError(f"not a safetensors file: {before!r} and {after!r} share bytes")
    return entries


def _entry(key: str, value: Any, *, data_start: int, size: int, packed: Any) -> Entry:
    """Return the checked entry of a tensor. `packed`: the dtype that the metadata gives its bytes, or
    None."""
    wrong = ValueError(f"the header's entry of {key!r} is wrong: {str(value)[:200]}")
    if not isinstance(value, dict):
        raise wrong
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or not _is_whole_numbers(shape) or not _is_whole_numbers(offsets):
        raise wrong
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - data_start:
        raise wrong
    if packed is not None:
        if (
            not isinstance(packed, str)
            or packed not in AS_BYTES
            or dtype != "U8"
            or shape[-1:] != [DTYPE_BYTES[packed]]
        ):
            raise wrong
        dtype, shape = packed, shape[:-1]
    entry = Entry(
        dtype=dtype, shape=tuple(shape), start=data_start + offsets[0], stop=data_start + offsets[1]
    )
    if dtype in DTYPE_BYTES and entry.numel * DTYPE_BYTES[dtype] != entry.stop - entry.start:
        raise wrong
    return entry


def _is_whole_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def tensor_sizes(path: Path) -> dict[str, tuple[str, int]]:
    """Return dtype and elements of every tensor. Raises OSError, or ValueError for a wrong header."""
    descriptor = open_regular(path, follow_link=True)
    try:
        entries = read_header(descriptor)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    finally:
        os.close(descriptor)
    unknown = sorted(key for key, entry in entries.items() if entry.dtype not in DTYPE_BYTES)
    if unknown:
        raise ValueError(f"{path.name}: {unknown[0]!r} has dtype {entries[unknown[0]].dtype}")
    return {key: (entry.dtype, entry.numel) for key, entry in entries.items()}
