"""Collects the stacks of the ranks: SIGUSR1, then what each rank's faulthandler appended to its file."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

from zerotrain.runtime.launch.process import RankProcess

POLL_S = 0.05
QUIET_POLLS = 3
MAX_DUMP_BYTES = 256 * 1024
NOTHING = "(no stacks: the program has not enabled faulthandler on SIGUSR1, or does not run)\n"


async def collect_stacks(ranks: Sequence[RankProcess], *, timeout_s: float = 2.0) -> str:
    """The dumps of all ranks, one section each; waits until the files rest or `timeout_s` is over."""
    before = {process.rank: _size(process.stacks_path) for process in ranks}
    for process in ranks:
        process.signal(signal.SIGUSR1)
    await _until_quiet([process.stacks_path for process in ranks], sum(before.values()), timeout_s)
    return "".join(_section(process, before[process.rank]) for process in ranks)


async def _until_quiet(paths: Sequence[Path], size_before: int, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    last, quiet = size_before, 0
    while quiet < QUIET_POLLS and loop.time() < deadline:
        await asyncio.sleep(POLL_S)
        size = sum(_size(path) for path in paths)
        quiet = quiet + 1 if size == last and size > size_before else 0
        last = size


def _section(process: RankProcess, start: int) -> str:
    state = "running" if process.running else f"ended with {process.status}"
    header = f"=== rank {process.rank} (pid {process.popen.pid}, {state})\n"
    return header + (_read_from(process.stacks_path, start) or NOTHING)


def _read_from(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(MAX_DUMP_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
