"""Removal of checkpoints after a commit: the newest `keep_last` stay, and those that are being read or are
tagged.

Rank 0 calls `retain` after each commit. A checkpoint is first renamed out of sight, then removed, so that a
crash half-way never leaves something that looks like a checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from zerotrain.contract.regular_file import open_regular
from zerotrain.runtime.checkpoint.files import json_bytes, remove_tree, write_durable
from zerotrain.runtime.checkpoint.names import (
    DAMAGED,
    MANIFEST,
    TRASH_PREFIX,
    Committed,
    committed,
    folders,
    is_step_folder,
)


def superfluous(
    checkpoints: Sequence[Committed], *, keep_last: int, damaged: Collection[str] = ()
) -> tuple[Committed, ...]:
    """Return the checkpoints that may be removed. `checkpoints` are newest first; damaged ones do not count
    as kept and tagged ones are never removed."""
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1: the newest checkpoint always stays; got {keep_last}")
    kept = 0
    gone = []
    for item in checkpoints:
        if not is_step_folder(item.path.name):
            continue
        if kept >= keep_last:
            gone.append(item)
        elif item.path.name not in damaged:
            kept += 1
    return tuple(gone)


def mark_damaged(folder: Path, reason: str) -> None:
    """Write a note into an unreadable checkpoint, so that it does not count as kept; best effort."""
    with contextlib.suppress(OSError):
        write_durable(folder / DAMAGED, json_bytes({"reason": reason}))


def retain(directory: Path, *, keep_last: int) -> tuple[str, ...]:
    """Remove superfluous checkpoints and return their names. Never raises for one that cannot be removed."""
    try:
        found = committed(directory)
    except OSError:
        return ()  # the volume failed, and an unreadable checkpoint may be whole
    damaged = {item.path.name for item in found if (item.path / DAMAGED).exists()}
    whole = {item.path.name for item in found}
    torn = [path for path in folders(directory) if is_step_folder(path.name) and path.name not in whole]
    going = [item.path for item in superfluous(found, keep_last=keep_last, damaged=damaged)]
    # A folder without a readable COMMIT is of no use once enough whole ones exist.
    if len(found) - len(damaged) >= keep_last:
        going += torn
    return tuple(path.name for path in going if _remove(path))


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Prevent `retain` of any process from removing a checkpoint while it is read."""
    descriptor = open_regular(folder / MANIFEST)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove(path: Path) -> bool:
    if _is_read(path):
        return False
    trash = path.with_name(TRASH_PREFIX + path.name)
    remove_tree(trash)
    try:
        path.rename(trash)
    except OSError:
        return False
    remove_tree(trash)
    return True


def _is_read(path: Path) -> bool:
    try:
        descriptor = open_regular(path / MANIFEST)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return (
            False  # no locks on this file system: readers are then only the ranks of this job, at its start
        )
    finally:
        os.close(descriptor)
    return False
