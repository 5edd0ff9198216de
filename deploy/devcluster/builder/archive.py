"""Writer of container images as docker-archive files, without a container tool.

The archive is a tar of layer tars, a configuration and a manifest; containerd (`ctr images import`), `kind
load` and `docker load` all read it. Its content is a function of the input, so equal trees give equal files.
"""

import hashlib
import io
import json
import os
import platform
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

EPOCH_S = 315_532_800
"""Modification time of every path without a meaningful one of its own: 1980-01-01."""

_BLOCK = 512
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer in an archive that has been written."""

    name: str
    sha256: str
    offset: int
    size: int
    """Position and length of its bytes in the archive that holds it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageConfig:
    """Settings that a container of the image starts with."""

    environ: Mapping[str, str] = field(default_factory=dict)
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    user: str = ""
    working_folder: str = "/"

    def to_json(self, layers: Iterable[Layer]) -> bytes:
        """Return the image configuration. Its hash is the image's identity."""
        document = {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "created": "1980-01-01T00:00:00Z",
            "config": {
                "Env": [f"{name}={value}" for name, value in self.environ.items()],
                "Entrypoint": list(self.entrypoint) or None,
                "Cmd": list(self.command) or None,
                "User": self.user,
                "WorkingDir": self.working_folder,
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.sha256}" for layer in layers]},
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


class _HashingFile:
    """File that hashes the bytes that it writes to another file."""

    def __init__(self, target: IO[bytes]) -> None:
        self._target = target
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.size += len(data)
        return self._target.write(data)


class ArchiveWriter:
    """Writer of one archive from front to back: layers first, then `finish`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._layers: list[Layer] = []

    def add_layer(self, name: str, entries: "Iterable[LayerEntry]") -> Layer:
        """Write a new layer. The parent directories of an entry must come before it."""
        header_at = self._file.tell()
        self._file.write(bytes(_BLOCK))  # the size is known only afterwards
        hashing = _HashingFile(self._file)
        with tarfile.open(fileobj=hashing, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as tar:  # type: ignore[call-overload]
            for entry in entries:
                entry.write_to(tar)
        layer = Layer(
            name=name, sha256=hashing.digest.hexdigest(), offset=header_at + _BLOCK, size=hashing.size
        )
        self._complete(layer, header_at)
        return layer

    def copy_layer(self, source: IO[bytes], layer: Layer) -> Layer:
        """Copy a layer of an earlier archive, byte for byte."""
        header_at = self._file.tell()
        self._file.write(bytes(_BLOCK))
        self._file.flush()
        _copy_range(source, self._file, offset=layer.offset, size=layer.size)
        copied = Layer(name=layer.name, sha256=layer.sha256, offset=header_at + _BLOCK, size=layer.size)
        self._complete(copied, header_at)
        return copied

    def finish(self, *, tag: str, config: ImageConfig) -> str:
        """Write configuration and manifest.

        Returns the image's identity, which is the hash of the configuration.
        """
        body = config.to_json(self._layers)
        identity = hashlib.sha256(body).hexdigest()
        manifest = [
            {
                "Config": f"{identity}.json",
                "RepoTags": [tag],
                "Layers": [f"{each.name}.tar" for each in self._layers],
            }
        ]
        self._add_file(f"{identity}.json", body)
        self._add_file("manifest.json", json.dumps(manifest).encode())
        self._file.write(bytes(2 * _BLOCK))  # the end of a tar
        return identity

    def _complete(self, layer: Layer, header_at: int) -> None:
        self._file.write(bytes(-layer.size % _BLOCK))
        end = self._file.tell()
        self._file.seek(header_at)
        self._file.write(_header(f"{layer.name}.tar", layer.size))
        self._file.seek(end)
        self._layers.append(layer)

    def _add_file(self, name: str, body: bytes) -> None:
        self._file.write(_header(name, len(body)) + body + bytes(-len(body) % _BLOCK))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerEntry:
    """One path of a layer: a directory, a symbolic link or a file (from disk or from memory)."""

    path: str
    """Absolute path, as seen in the container."""
    mode: int = 0o644
    link_to: str | None = None
    source: Path | None = None
    body: bytes | None = None
    modified_s: int = EPOCH_S
    is_folder: bool = False

    def write_to(self, tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(self.path.lstrip("/"))  # owner 0:0 with empty names is TarInfo's default
        info.mode, info.mtime = self.mode, self.modified_s
        if self.is_folder:
            info.type = tarfile.DIRTYPE
            tar.addfile(info)
        elif self.link_to is not None:
            info.type, info.linkname = tarfile.SYMTYPE, self.link_to
            tar.addfile(info)
        elif self.source is not None:
            with self.source.open("rb") as file:
                info.size = os.fstat(file.fileno()).st_size
                tar.addfile(info, file)
        else:
            body = self.body or b""
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))


@contextmanager
def archive_at(path: Path) -> Iterator[ArchiveWriter]:
    """Write an archive beside `path`, and move it to `path` only if there was no error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w+b") as file:
            yield ArchiveWriter(file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mtime = size, EPOCH_S
    # GNU format uses one block for any size; PAX would need a second header from 8 GiB on.
    return info.tobuf(format=tarfile.GNU_FORMAT)


def _copy_range(source: IO[bytes], target: IO[bytes], *, offset: int, size: int) -> None:
    source.seek(offset)
    while size > 0:
        data = source.read(min(size, 8 << 20))
        if not data:
            raise EOFError(f"an image archive ended {size} bytes early; `build.py clean` and build it again")
        target.write(data)
        size -= len(data)
