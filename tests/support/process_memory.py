"""Looks into the memory of a process from outside, as root or its own user can."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_HEADER = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) ")


def guarded_ranges(pid: int) -> list[tuple[int, int]]:
    """(start, stop) of mappings that are locked, left out of cores and wiped in forked children."""
    found, current = [], (0, 0)
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if header := _HEADER.match(line):
            current = (int(header[1], 16), int(header[2], 16))
        elif line.startswith("VmFlags:") and {"lo", "dd", "wf"} <= set(line.split()[1:]):
            found.append(current)
    return found


def read_memory(pid: int, start: int, stop: int) -> bytes:
    """The bytes at [start, stop)."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(start)
        return memory.read(stop - start)


def guarded_memory(pid: int) -> bytes:
    """All of `guarded_ranges`."""
    return b"".join(read_memory(pid, start, stop) for start, stop in guarded_ranges(pid))


def possible_keys(memory: bytes) -> Iterator[bytes]:
    """Every 32 bytes at a 64-byte border that are not zeros."""
    for start in range(0, len(memory), 64):
        if any(memory[start : start + 32]):
            yield memory[start : start + 32]


def find_in_file(path: Path, needles: list[bytes], *, step: int = 1 << 24) -> set[bytes]:
    """Which of the needles the file holds."""
    found: set[bytes] = set()
    longest = max(len(needle) for needle in needles)
    with path.open("rb") as file:
        kept = b""
        while piece := file.read(step):
            kept = kept[-longest:] + piece
            found.update(needle for needle in needles if needle in kept)
    return found
