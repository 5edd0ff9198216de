"""Access to the memory of another process, as root or the process's own user has it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_HEADER = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) ")


def guarded_ranges(pid: int) -> list[tuple[int, int]]:
    """Return (start, stop) of mappings that are locked, excluded from cores and wiped in forked children."""
    found, current = [], (0, 0)
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if header := _HEADER.match(line):
            current = (int(header[1], 16), int(header[2], 16))
        elif line.startswith("VmFlags:") and {"lo", "dd", "wf"} <= set(line.split()[1:]):
            found.append(current)
    return found


def read_memory(pid: int, start: int, stop: int) -> bytes:
    """Return the bytes at [start, stop)."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(start)
        return memory.read(stop - start)


def guarded_memory(pid: int) -> bytes:
    """Return the contents of all `guarded_ranges`."""
    return b"".join(read_memory(pid, start, stop) for start, stop in guarded_ranges(pid))


def possible_keys(memory: bytes) -> Iterator[bytes]:
    """Yield every 32 bytes at a 64-byte boundary that are not all zero."""
    for start in range(0, len(memory), 64):
        if any(memory[start : start + 32]):
            yield memory[start : start + 32]


def find_in_file(path: Path, needles: list[bytes], *, step: int = 1 << 24) -> set[bytes]:
    """Return those of the needles that the file contains."""
    found: set[bytes] = set()
    longest = max(len(needle) for needle in needles)
    with path.open("rb") as file:
        kept = b""
        while piece := file.read(step):
            kept = kept[-longest:] + piece
            found.update(needle for needle in needles if needle in kept)
    return found
