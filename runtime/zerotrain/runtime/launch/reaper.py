"""Finds and ends processes that ranks left behind; the launcher adopts them (as PID 1, or as a subreaper)."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.02


def adopt_orphans() -> None:
    """Make this process adopt descendants whose parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def children(parent: int) -> list[int]:
    """Return the pids whose parent is `parent`, zombies included."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it ended in the meantime
            # The process name may hold spaces and parentheses; the parent is the second field after it.
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.name))
    return found


def end_children(*, keep: frozenset[int] = frozenset(), timeout_s: float = 2.0) -> None:
    """SIGKILL and reap every child but `keep` until none is left; this process may inherit the children of a
    killed one."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not (pids := set(children(os.getpid())) - keep):
            return
        for pid in pids:
            _end(pid)
        time.sleep(POLL_S)


def _end(pid: int) -> None:
    """End one process by pid, never with `waitpid(-1)`: the status of a kept child belongs to its starter."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)
    except (ProcessLookupError, ChildProcessError):
        return
