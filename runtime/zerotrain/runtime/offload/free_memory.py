"""Host memory and disk space that is available for offloading; read by `fit.py`.

Memory is bounded by the machine and by every control group (v1 and v2) that the process is in. The kernel's
cache of files counts as free, as the kernel gives it back; shared memory and tmpfs do not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60
"""Least value that means "no limit": control groups without a limit report more than any machine has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeMemory:
    """One bound on this process's memory, in bytes."""

    limit: int
    used: int
    """Used bytes of the limit, without the kernel's cache of files."""
    source: str
    """Description of what sets the limit, for the message."""

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


def free_memory(root: Path = Path("/")) -> FreeMemory:
    """Return the tightest bound on this process's memory. `root` stands for / in tests."""
    return min((_machine(root), *_groups(root)), key=lambda bound: bound.free)


def disk_free(folders: Sequence[Path]) -> int | None:
    """Return the bytes that a spill striped over these folders can take; None where one is not writable."""
    smallest: dict[int, int] = {}  # by file system
    shares: dict[int, int] = {}
    for folder in folders:
        there = next((parent for parent in (folder, *folder.parents) if parent.exists()), folder)
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            return None
        found = os.statvfs(there)
        disk = there.stat().st_dev
        smallest[disk] = found.f_bavail * found.f_frsize
        shares[disk] = shares.get(disk, 0) + 1
    return min((free * len(folders) // shares[disk] for disk, free in smallest.items()), default=0)


def _machine(root: Path) -> FreeMemory:
    facts = _numbers(root / "proc/meminfo")
    total = facts.get("MemTotal:", _UNLIMITED // 1024) * 1024
    free = facts.get("MemAvailable:", total // 1024) * 1024
    return FreeMemory(limit=total, used=total - free, source="the machine's memory")


def _groups(root: Path) -> Iterator[FreeMemory]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield from _tree(root / "sys/fs/cgroup", path, _v2)
        elif "memory" in controllers.split(","):
            yield from _tree(root / "sys/fs/cgroup/memory", path, _v1)


def _tree(mount: Path, path: str, read: Callable[[Path], FreeMemory | None]) -> Iterator[FreeMemory]:
    """Yield the bounds of the group and of those above it. In a container the mount is often the group
    itself, whatever its path."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        found = read(mount.joinpath(*parts[:depth]))
        if found is not None:
            yield found


def _v2(folder: Path) -> FreeMemory | None:
    limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
    stat = _numbers(folder / "memory.stat")
    cached = stat.get("file", 0) - stat.get("shmem", 0) + stat.get("slab_reclaimable", 0)
    return _cgroup_bound(folder, limit, used, cached)


def _v1(folder: Path) -> FreeMemory | None:
    limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    stat = _numbers(folder / "memory.stat")
    return _cgroup_bound(folder, limit, used, stat.get("total_cache", 0) - stat.get("total_shmem", 0))


def _cgroup_bound(folder: Path, limit: int | None, used: int | None, cached: int) -> FreeMemory | None:
    if limit is None or limit >= _UNLIMITED or used is None:
        return None
    return FreeMemory(limit=limit, used=max(0, used - max(0, cached)), source=f"memory limit of {folder}")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # absent, or "max"


def _numbers(path: Path) -> dict[str, int]:
    """Parse `name 123 ...` lines; empty where there is no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {row[0]: int(row[1]) for row in words if len(row) > 1 and row[1].isdigit()}
