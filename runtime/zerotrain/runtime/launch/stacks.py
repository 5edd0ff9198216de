"""Collects the stacks of the ranks: sends SIGUSR1, then reads the text that each rank's faulthandler appended
to its file. SIGUSR2 follows for a rank that enabled it and wrote nothing (`runtime/channel.py` says why there
are two). Neither is sent to a process that it would end.

A rank that cannot answer, because it is stopped or inside the kernel, is recognised by the state of its
process, which needs no answer.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

from zerotrain.contract.worker_http import MAX_STACKS_BYTES
from zerotrain.runtime.launch.process import RankProcess

TIMEOUT_S = 2.0
POLL_S = 0.05
QUIET_POLLS = 3
HEADER_BYTES = 200
"""Upper bound for the line before a rank's stacks."""

NOTHING = (
    "(no stacks: the program has not enabled faulthandler on SIGUSR1, cannot run, or is the child of a "
    "shell; `exec` puts it in the shell's place)\n"
)
CUT = "\n(cut: each rank has {limit} bytes)\n"
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel, waiting for a device",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
}
"""Letters of /proc/<pid>/stat."""


async def collect_stacks(ranks: Sequence[RankProcess], *, timeout_s: float = TIMEOUT_S) -> str:
    """Return the dumps of all ranks, one section each; wait until the files stop growing or `timeout_s` is
    over, twice where SIGUSR2 has to follow."""
    before = {process.rank: _size(process.stacks_path) for process in ranks}
    for process in ranks:
        if not _would_end(process, signal.SIGUSR1):
            process.signal(signal.SIGUSR1)
    await _until_quiet([process.stacks_path for process in ranks], sum(before.values()), timeout_s)
    silent = [process for process in ranks if _holds_its_lock(process, before[process.rank])]
    for process in silent:
        process.signal(signal.SIGUSR2)
    if silent:
        size = sum(_size(process.stacks_path) for process in silent)
        await _until_quiet([process.stacks_path for process in silent], size, timeout_s)
    share = MAX_STACKS_BYTES // max(len(ranks), 1) - HEADER_BYTES
    return "".join(_section(process, before[process.rank], share) for process in ranks)


def _holds_its_lock(process: RankProcess, before: int) -> bool:
    """Return whether a rank that runs and could dump wrote nothing. A stopped rank does not count: it would
    receive the signal when it continues, while its stacks move."""
    has_written = _size(process.stacks_path) > before
    runs = process.running and _process_state(process.popen.pid) in (STATES["R"], STATES["S"])
    return runs and not has_written and _can_dump(process)


def _can_dump(process: RankProcess) -> bool:
    """Return whether the process catches the signal and the rank made the file: a shell around the program
    does not catch it, and a program with a handler of its own for other purposes made no file."""
    caught = _signals(process, "SigCgt")
    return process.stacks_path.exists() and caught is not None and signal.SIGUSR2 in caught


def _would_end(process: RankProcess, number: signal.Signals) -> bool:
    """Return whether the process neither catches nor ignores the signal: it is still becoming the guard, or
    has become another program since."""
    caught, ignored = _signals(process, "SigCgt"), _signals(process, "SigIgn")
    return caught is not None and ignored is not None and number not in caught | ignored


def _signals(process: RankProcess, key: str) -> frozenset[int] | None:
    """Return the set of signals of that name in /proc/<pid>/status; None where it cannot be read."""
    try:
        lines = Path(f"/proc/{process.popen.pid}/status").read_text().splitlines()
        mask = next(int(line.partition(":")[2], 16) for line in lines if line.startswith(f"{key}:"))
    except (OSError, ValueError, StopIteration):
        return None
    return frozenset(number for number in range(1, signal.NSIG) if mask >> (number - 1) & 1)


async def _until_quiet(paths: Sequence[Path], size_before: int, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    last, quiet = size_before, 0
    while quiet < QUIET_POLLS and loop.time() < deadline:
        await asyncio.sleep(POLL_S)
        size = sum(_size(path) for path in paths)
        quiet = quiet + 1 if size == last and size > size_before else 0
        last = size


def _section(process: RankProcess, start: int, limit: int) -> str:
    state = _process_state(process.popen.pid) if process.running else f"ended with {process.status}"
    header = f"=== rank {process.rank} (pid {process.popen.pid}, {state})\n"
    return header + (_read_from(process.stacks_path, start, limit) or NOTHING)


def _process_state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "ended"
    return STATES.get(letter, letter)


def _read_from(path: Path, start: int, limit: int) -> str:
    note = CUT.format(limit=limit)
    try:
        with path.open("rb") as file:
            file.seek(start)
            text = file.read(limit)
            is_whole = not file.read(1)
    except OSError:
        return ""
    if is_whole:
        return text.decode(errors="ignore")
    return text[: limit - len(note)].decode(errors="ignore") + note


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
