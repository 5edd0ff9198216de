"""Ownership of a checkpoint folder: the fence, and the lock under which it is read and moved.

A new attempt writes `fence.json` before it loads anything. Every commit re-reads it under the lock, so that a
pod of an older attempt that is still running on a lost node can finish writing but never commit. Another job
(other uid) that is pointed at the folder takes it over in the same way.

A program may save into any folder, another one in each save. So a commit anywhere also needs the fence of the
job's own folder, where the launch environment names one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from zerotrain.contract.strict_json import read_json
from zerotrain.runtime.checkpoint.errors import CheckpointFenced
from zerotrain.runtime.checkpoint.files import json_bytes, replace_durable
from zerotrain.runtime.checkpoint.names import FENCE, LOCK, MAX_RECORD_BYTES, is_count

LOCK_WAIT_SECONDS = 10.0
"""Seconds to wait for the lock: a lost node may hold that of a network file system until its lease ends. Then
the holder is ignored."""

_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """One attempt of one job. Without an operator the uid is empty and the attempt 1."""

    attempt: int
    job_uid: str = ""

    def __str__(self) -> str:
        return f"attempt {self.attempt}" + (f" of job {self.job_uid}" if self.job_uid else "")


def read_fence(directory: Path) -> Owner | None:
    """Return the owner; None without a fence, or with one torn by the disk (it is replaced atomically)."""
    try:
        record = read_json(directory / FENCE, max_bytes=MAX_RECORD_BYTES)
        owner = Owner(attempt=record["attempt"], job_uid=str(record["job_uid"]))
        return owner if is_count(owner.attempt) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def take_over(directory: Path, owner: Owner) -> None:
    """Make `owner` the folder's owner. Raises CheckpointFenced when a higher attempt of the job owns it."""
    with folder_lock(directory):
        current = read_fence(directory)
        if current is not None and current.job_uid == owner.job_uid and current.attempt > owner.attempt:
            raise CheckpointFenced.found(directory, mine=str(owner), fence=str(current))
        if current != owner:
            replace_durable(directory / FENCE, json_bytes(asdict(owner)))


def check_owner(directory: Path, owner: Owner) -> None:
    """Raise CheckpointFenced unless `owner` may commit. The caller must hold the lock."""
    current = read_fence(directory)
    if current is None or current == owner:
        return
    if current.job_uid != owner.job_uid or current.attempt > owner.attempt:
        raise CheckpointFenced.found(directory, mine=str(owner), fence=str(current))


@contextlib.contextmanager
def owned(directory: Path, owner: Owner, *, job_folder: Path | None = None) -> Iterator[None]:
    """Hold the locks of the folder and of the job's own while something is committed.

    Raises CheckpointFenced unless `owner` may commit in both.
    """
    # The job's folder first, in every process.
    places = [directory] if job_folder in (None, directory) else [job_folder, directory]
    with contextlib.ExitStack() as locks:
        for place in places:
            if place is not None and place.is_dir():
                locks.enter_context(folder_lock(place))
                check_owner(place, owner)
        yield


@contextlib.contextmanager
def folder_lock(directory: Path, *, wait_seconds: float = LOCK_WAIT_SECONDS) -> Iterator[bool]:
    """Hold the folder's lock; yield False where the file system has no locks or the holder keeps it."""
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield _lock(descriptor, wait_seconds)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait_seconds: float) -> bool:
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        else:
            return True
