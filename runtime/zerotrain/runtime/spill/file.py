"""The spill file's folders and limits around the native `SpillFile`; made by `SpillStore`.

Every failure that can be foreseen is checked here before a byte is allocated. The file has no name after it
was opened: nothing is left to clean up.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zerotrain.runtime._native import SpillFile
from zerotrain.runtime.spill.chunks import BLOCK_BYTES
from zerotrain.runtime.spill.errors import SpillDoesNotFit, SpillError
from zerotrain.runtime.spill.seal import SpillIdentity

ENGINE_ENV = "ZEROTRAIN_SPILL_ENGINE"
"""Variable that forces "io_uring", "libaio" or "threads", for tests and for comparisons."""

STRIPE_BYTES = 4 << 20
"""Bytes that one of several folders gets before the next one follows."""

KEEP_MORE = "keep more in memory with a smaller zero_optimization.offload_optimizer.ratio"
OTHER_FOLDER = (
    "give a folder on a local disk that this user may write to in zero_optimization.spill.paths or nvme_path"
)

MAX_REQUEST_BYTES = 64 << 20
MAX_QUEUE_DEPTH = 1024


class SpillLimit:
    """Limit of the bytes that spill files take together; thread-safe."""

    def __init__(self, limit_bytes: int, *, within: SpillLimit | None = None) -> None:
        """Set the limit. `within`: bytes taken here are taken there as well, until this object is gone."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._within = within
        self._lock = threading.Lock()

    def __del__(self) -> None:
        """Give back the bytes of a spill store that was dropped without being closed: it has no file any
        more."""
        if self._within is not None:
            self._within.give_back(self.used_bytes)

    def take(self, num_bytes: int, *, rank: int) -> None:
        """Count bytes as used. Raises SpillDoesNotFit above the limit."""
        with self._lock:
            needed = self.used_bytes + num_bytes
            if needed > self.limit_bytes:
                raise SpillDoesNotFit(
                    f"the spill file of rank {rank} needs {needed} bytes, its limit is {self.limit_bytes} "
                    f"(ZEROTRAIN_NVME_BYTES divided by the ranks that share the volume, or "
                    f"zero_optimization.spill.max_bytes); raise it by {needed - self.limit_bytes} bytes a "
                    f"rank, use more ranks, or {KEEP_MORE}"
                )
            if self._within is not None:
                self._within.take(num_bytes, rank=rank)
            self.used_bytes = needed

    def give_back(self, num_bytes: int) -> None:
        """Count bytes as free again."""
        with self._lock:
            self.used_bytes -= num_bytes
            if self._within is not None:
                self._within.give_back(num_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpillPlace:
    """Location of the spill file, and how it is read and written."""

    folders: tuple[Path, ...]
    """Folders, existing or to be made; with several, the file's stripes go to them in rotation."""

    limit: SpillLimit | None = None
    """Limit of the file's size; None = the free space of the disks."""

    engine: str = "auto"
    """I/O engine: "auto", "io_uring", "libaio" or "threads"; ZEROTRAIN_SPILL_ENGINE replaces "auto"."""

    queue_depth: int = 32
    """Number of requests under way per folder."""

    request_bytes: int = 1 << 20
    """Bytes of one request; rounded down to whole blocks."""


def open_spill_file(place: SpillPlace, num_bytes: int, identity: SpillIdentity) -> SpillFile:
    """Open a file without a name and allocate its bytes. Raises SpillDoesNotFit, SpillError."""
    for folder in place.folders:
        _make_folder(folder)
    _take(place, 0, num_bytes, identity)
    own: list[str] = []
    try:
        return SpillFile(
            [_private_folder(folder, identity, own) for folder in place.folders],
            num_bytes,
            engine=os.environ.get(ENGINE_ENV, "auto") if place.engine == "auto" else place.engine,
            queue_depth=min(max(place.queue_depth, 1), MAX_QUEUE_DEPTH),
            request_bytes=_whole_blocks(place.request_bytes),
            stripe_bytes=STRIPE_BYTES,
        )
    except OSError as error:
        _give_back(place, num_bytes)
        raise _refusal(error, place, num_bytes, identity) from error
    except BaseException:
        _give_back(place, num_bytes)
        raise
    finally:
        remove_folders(own)


def grow(file: SpillFile, place: SpillPlace, num_bytes: int, identity: SpillIdentity) -> None:
    """Allocate up to `num_bytes`. Raises SpillDoesNotFit; the file is then as before."""
    old = file.num_bytes
    if num_bytes <= old:
        return
    _take(place, old, num_bytes, identity)
    try:
        file.resize(num_bytes)
    except OSError as error:
        _give_back(place, num_bytes - old)
        raise _refusal(error, place, num_bytes, identity) from error


def close(file: SpillFile, place: SpillPlace) -> None:
    """Wait for the requests under way and close the file; its space is free afterwards."""
    num_bytes = file.num_bytes
    try:
        file.close()
    finally:
        _give_back(place, num_bytes)


def remove_folders(folders: Sequence[str]) -> None:
    """Remove the process's own folders: the open file needs no name. (NFS gives it one, and keeps the
    folder.)"""
    for folder in folders:
        with suppress(OSError):
            os.rmdir(folder)


def _private_folder(folder: Path, identity: SpillIdentity, own: list[str]) -> str:
    """Return the folder in which the file is opened. It is a new one (0700) only where files cannot be made
    without a name: a process that is killed in between would leave it behind."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError:
        own.append(tempfile.mkdtemp(prefix=_prefix(identity), dir=folder))
        return own[-1]
    return str(folder)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise SpillError(
            f"the spill folder {folder} cannot be made: {error.strerror}; {OTHER_FOLDER}"
        ) from error


def _prefix(identity: SpillIdentity) -> str:
    return f"zerotrain-{re.sub(r'[^A-Za-z0-9.-]', '-', identity.job)[:64]}-{identity.rank}-"


def _whole_blocks(num_bytes: int) -> int:
    return min(max(num_bytes // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES), MAX_REQUEST_BYTES)


def _take(place: SpillPlace, old: int, new: int, identity: SpillIdentity) -> None:
    _check_space(place, new - old, identity)
    if place.limit is not None:
        place.limit.take(new - old, rank=identity.rank)


def _give_back(place: SpillPlace, num_bytes: int) -> None:
    if place.limit is not None:
        place.limit.give_back(num_bytes)


def _check_space(place: SpillPlace, num_bytes: int, identity: SpillIdentity) -> None:
    """Raise SpillDoesNotFit where a file system has less than its share; folders may share one."""
    by_device: dict[int, list[Path]] = {}
    for folder in place.folders:
        by_device.setdefault(folder.stat().st_dev, []).append(folder)
    for folders in by_device.values():
        share = -(-num_bytes * len(folders) // len(place.folders))
        stat = os.statvfs(folders[0])
        free = stat.f_bavail * stat.f_frsize
        if share > free:
            raise SpillDoesNotFit(
                f"the spill file of rank {identity.rank} needs {share} more bytes in {folders[0]}, where "
                f"{free} are free; free {share - free} more, give several disks in "
                f"zero_optimization.spill.paths, or {KEEP_MORE}"
            )


def _refusal(error: OSError, place: SpillPlace, num_bytes: int, identity: SpillIdentity) -> SpillError:
    where = ", ".join(map(str, place.folders))
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return SpillDoesNotFit(
            f"the spill file of rank {identity.rank} needs {num_bytes} bytes in {where}, and the system "
            f"refused them: {error.strerror}; free some space, raise the quota or the file size limit, or "
            "give other disks in zero_optimization.spill.paths"
        )
    return SpillError(
        f"the spill file of rank {identity.rank} cannot be made in {where}: {error.strerror}; {OTHER_FOLDER}"
    )
