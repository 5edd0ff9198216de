"""Durable file operations: every write is synced, every replacement is atomic. Used by writer and fence."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durable(path: Path, data: bytes) -> None:
    """Create or overwrite a file and sync its contents (not its name)."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_durable(path: Path, data: bytes) -> None:
    """Replace a file so that a reader or a crash sees the old contents or the new, never a mixture."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        write_durable(temporary, data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Return compact JSON. Raises ValueError or TypeError for NaN, bytes, tensors and the like."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write on the disk that holds `path`; 0 when unknown."""
    try:
        stats = os.statvfs(path)
    except OSError:
        return 0
    return stats.f_bavail * stats.f_frsize


def remove_tree(path: Path) -> None:
    """Remove a folder if it is there (of a link, only the link); what cannot be removed is left for the next
    save."""
    if path.is_symlink():
        with contextlib.suppress(OSError):
            path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def remove_any(path: Path) -> None:
    """Remove a file or a folder with its contents; what cannot be removed is left."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
