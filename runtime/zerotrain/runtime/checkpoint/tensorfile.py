"""One file in safetensors layout, written and read without a copy of its contents.

The safetensors library serialises whole tensors to bytes before it writes them, which doubles memory at the
worst moment. So the writer here takes one tile at a time from a tensor's memory or a `StateStream` (hashing
it while it is in cache) and the reader `pread`s element ranges. The files are ordinary safetensors files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zerotrain.contract.regular_file import open_regular
from zerotrain.runtime.checkpoint.rawfile import (
    AS_BYTES,
    DTYPE_BYTES,
    METADATA_PREFIX,
    WrittenFile,
    read_header,
)
from zerotrain.runtime.zero.state import StateStream, TensorStream, windows
from zerotrain.runtime.zero.strided import flat

Content = torch.Tensor | StateStream
"""Content under a key of a file; a stream is stored as a 1-D tensor."""

TILE_BYTES = 8 << 20
"""Bytes that are read or cast at a time; small enough to stay in cache."""

HEADER_ALIGN = 4096
"""Alignment of the header's end in bytes; padding makes tensor data start on a page."""

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "complex128": torch.complex128,
    "complex32": torch.complex32,
    "float4_e2m1fn_x2": torch.float4_e2m1fn_x2,
}
"""Dtypes of torch by the names of `rawfile.DTYPE_BYTES`."""
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(tensor: Content, key: str) -> str:
    """Return a dtype's name in `rawfile.DTYPE_BYTES`. Raises ValueError for one that cannot be stored."""
    try:
        return DTYPE_NAMES[tensor.dtype]
    except KeyError:
        raise ValueError(f"tensor {key!r} has dtype {tensor.dtype}, which a checkpoint cannot hold") from None


def stream_of(content: Content) -> StateStream:
    """Return the elements one after another, also those of a tensor with any strides."""
    if not isinstance(content, torch.Tensor):
        return content
    return TensorStream(flat(content))


def num_bytes_of(content: Content) -> int:
    """Return the bytes of the elements."""
    numel = content.numel() if isinstance(content, torch.Tensor) else content.numel
    return numel * content.dtype.itemsize


def add_entry(
    header: dict[str, Any], key: str, *, dtype: str, shape: Sequence[int], offsets: tuple[int, int]
) -> None:
    """Add one tensor to a file's header; `dtype` as in `rawfile.DTYPE_BYTES`, offsets in bytes."""
    stored, sizes = dtype, list(shape)
    if dtype in AS_BYTES:
        header.setdefault("__metadata__", {})[METADATA_PREFIX + key] = dtype
        stored, sizes = "U8", [*sizes, DTYPE_BYTES[dtype]]
    header[key] = {"dtype": stored, "shape": sizes, "data_offsets": list(offsets)}


def header_bytes(tensors: Mapping[str, Content]) -> bytes:
    """Return length prefix and header for these tensors, padded with blanks to HEADER_ALIGN."""
    header: dict[str, Any] = {}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + num_bytes_of(tensor)
        shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else (tensor.numel,)
        add_entry(header, key, dtype=dtype_name(tensor, key), shape=shape, offsets=(start, end))
    return padded_header(header)


def padded_header(header: Mapping[str, Any]) -> bytes:
    """Return length prefix and JSON of a header, padded with blanks to HEADER_ALIGN."""
    text = json.dumps(header, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // HEADER_ALIGN) * HEADER_ALIGN - 8
    return padded.to_bytes(8, "little") + text.ljust(padded, b" ")


def file_size(tensors: Mapping[str, Content]) -> int:
    """Return the size in bytes of the file that `write_tensors` makes of these tensors."""
    return len(header_bytes(tensors)) + sum(map(num_bytes_of, tensors.values()))


def write_tensors(path: Path, tensors: Mapping[str, Content]) -> WrittenFile:
    """Write and sync one file; tensors of any device and streams of any tier, a window at a time.

    Raises OSError (the caller removes the file), and what reading a stream raises.
    """
    digest = hashlib.sha256()
    size = file_size(tensors)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        # Allocate all the space at once: a full disk shows before the first byte instead of in the middle.
        os.posix_fallocate(descriptor, 0, size)
        _write_all(descriptor, digest, memoryview(header_bytes(tensors)))
        for tensor in tensors.values():
            stream = stream_of(tensor)
            for start, stop in windows(stream.numel):
                _write_all(descriptor, digest, _memory(stream.read(start, stop).cpu()))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return WrittenFile(size=size, sha256=digest.hexdigest())


class TensorFile:
    """An open safetensors file from which element ranges are read. A context manager."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises OSError, or ValueError when the header is not that of a safetensors file."""
        self._path = path
        self._descriptor = open_regular(path, follow_link=True)
        try:
            self._entries = read_header(self._descriptor)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def keys(self) -> list[str]:
        """Return the names of the tensors in the file."""
        return list(self._entries)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the stored shape. Raises ValueError for an unknown key or dtype."""
        self._locate(key, 0, 0)
        return self._entries[key].shape

    def dtype(self, key: str) -> torch.dtype:
        """Return the stored dtype. Raises ValueError for an unknown key or dtype."""
        return self._locate(key, 0, 0)[1]

    def read(self, key: str) -> torch.Tensor:
        """Return the whole tensor, in its stored shape and dtype, in host memory."""
        start, dtype = self._locate(key, 0, 0)
        tensor = torch.empty(self._entries[key].shape, dtype=dtype)
        self._read_all(_memory(tensor.view(-1)), start)
        return tensor

    def read_into(self, key: str, source: int, target: torch.Tensor) -> None:
        """Fill 1-D `target` with elements `[source, source + target.numel())` of tensor `key`.

        Bytes go straight into `target` when it lies in host memory and has the stored dtype; otherwise tile
        by tile through a staging buffer. Raises ValueError for an unknown key or a range outside the tensor.
        """
        start, dtype = self._locate(key, source, target.numel())
        if target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
            self._read_all(_memory(target), start)
            return
        tile = max(1, TILE_BYTES // dtype.itemsize)
        staging = torch.empty(min(tile, target.numel()), dtype=dtype)
        for first in range(0, target.numel(), tile):
            part = staging[: min(tile, target.numel() - first)]
            self._read_all(_memory(part), start + first * dtype.itemsize)
            target[first : first + part.numel()].copy_(part)

    def part(self, key: str, source: int, length: int) -> torch.Tensor:
        """Return elements `[source, source + length)` of tensor `key`, in its dtype. Raises ValueError as
        `read_into` does."""
        tensor = torch.empty(length, dtype=self._locate(key, source, length)[1])
        self.read_into(key, source, tensor)
        return tensor

    def _locate(self, key: str, source: int, length: int) -> tuple[int, torch.dtype]:
        entry = self._entries.get(key)
        if entry is None:
            raise ValueError(f"{self._path.name} holds no tensor {key!r}")
        if entry.dtype not in DTYPES:
            raise ValueError(
                f"{self._path.name}: {key!r} has dtype {entry.dtype}; readable are {', '.join(DTYPES)}"
            )
        dtype = DTYPES[entry.dtype]
        if source < 0 or source + length > entry.numel:
            raise ValueError(
                f"{self._path.name}: elements [{source}, {source + length}) are outside {key!r} of "
                f"{entry.numel}"
            )
        return entry.start + source * dtype.itemsize, dtype

    def _read_all(self, view: memoryview, position: int) -> None:
        while view.nbytes:
            count = os.preadv(self._descriptor, [view], position)
            if count == 0:
                raise ValueError(f"{self._path.name} ends at byte {position}: it was cut short")
            view, position = view[count:], position + count


def _memory(flat: torch.Tensor) -> memoryview:
    return flat.contiguous().view(torch.uint8).numpy().data


def _write_all(descriptor: int, digest: hashlib._Hash, view: memoryview) -> None:
    digest.update(view)
    while view.nbytes:
        view = view[os.write(descriptor, view) :]
