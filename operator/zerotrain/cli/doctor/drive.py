"""Checks of the folder that states would be spilled to: free space, I/O engine and speed."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from zerotrain.cli.doctor.finding import Finding, Group, State
from zerotrain.cli.probe import QUEUE, ProbeError, disk_gbps, scratch_file
from zerotrain.contract.planner import bytes_text

SLOW_GBPS = 0.5
"""Speed below which the drive, not the processor, bounds an offloaded step."""
BLOCK = 4096
SMALL_READS = 256
MEMORY_KINDS = frozenset({"tmpfs", "ramfs"})


def drive(folder: Path) -> list[Finding]:
    """Measure the folder's drive for a few seconds. No file is left behind."""
    group = Group("drive")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        group.add("folder", State.FAIL, str(folder), "cannot be written in; give another --folder")
        return group.findings
    found = os.statvfs(folder)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    kind = file_system(folder)
    group.check(
        "file system",
        f"{kind or 'not known'}, {bytes_text(size)}, {bytes_text(free)} free",
        good=kind not in MEMORY_KINDS,
        note="this is memory, not a drive: spilling there saves nothing",
    )
    _engine(group, folder)
    try:
        speed = disk_gbps(folder)
    except ProbeError as error:
        group.add("speed", State.FAIL, "", str(error))
        return group.findings
    group.check(
        "speed",
        f"{speed:.2f} GB/s, written and read by {QUEUE} threads",
        good=speed >= SLOW_GBPS,
        note=f"below {SLOW_GBPS} GB/s an offloaded step waits for the drive: zerotrain plan --rate "
        f"nvme={speed:.2f} shows how long",
    )
    _latency(group, folder)
    return group.findings


def file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of `folder`'s file system, from the mount table; empty if it is not known."""
    best, kind = "", ""
    place = str(folder.resolve())
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind


def _engine(group: Group, folder: Path) -> None:
    """Report the I/O engine that the spill would choose in `folder`, and why not a better one."""
    try:
        from zerotrain.runtime._native import SpillFile
    except ImportError:
        group.add("I/O engine", State.SKIP, "", "the native module is not installed")
        return
    try:
        file = SpillFile([str(folder)], 1 << 20)
    except (OSError, RuntimeError) as error:
        group.add("I/O engine", State.FAIL, "", f"no spill file can be made: {error}")
        return
    try:
        group.check("I/O engine", file.engine, good=file.engine == "io_uring", note=file.engine_reason)
        direct = "direct (O_DIRECT)" if file.is_direct() else "through the page cache"
        group.check("I/O path", direct, good=file.is_direct(), note=file.direct_reason())
        reason = file.allocation_reason()
        group.check("space", "none reserved" if reason else "reserved", good=not reason, note=reason)
        group.add("file's name", State.OK, f"none ({file.unlinked_by()})")
    finally:
        file.close()


def _latency(group: Group, folder: Path) -> None:
    """Measure the median time to read a random block.

    It bypasses the page cache where the file system allows it.
    """
    try:
        with scratch_file(folder) as handle, mmap.mmap(-1, BLOCK) as block:
            for at in range(SMALL_READS):
                os.pwrite(handle, block, at * BLOCK)
            os.fsync(handle)
            times = sorted(_timed_read(handle, block, at) for at in range(SMALL_READS))
    except OSError as error:
        group.add("latency", State.SKIP, "", f"not measured: {error.strerror}")
        return
    group.add("latency", State.OK, f"{times[len(times) // 2] * 1e6:.0f} us a block of {BLOCK} bytes, median")


def _timed_read(handle: int, block: mmap.mmap, at: int) -> float:
    began = time.perf_counter()
    os.preadv(handle, [block], at * 37 % SMALL_READS * BLOCK)
    return time.perf_counter() - began
