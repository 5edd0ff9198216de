"""Finds and ends what ranks left behind; the launcher adopts such processes (PID 1, or as a subreaper)."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.02


def adopt_orphans() -> None:
    """From now on descendants whose parent ends become this process's children."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def children(parent: int) -> list[int]:
    """The pids whose parent is `parent`, zombies included."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it ended while we looked
            # The process name may hold spaces and parentheses; the parent is the second field after it.
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.name))
    return found


def end_children(*, keep: frozenset[int] = frozenset(), timeout_s: float = 2.0) -> None:
    """SIGKILL and reap every child but `keep` until none is left; killing one may hand us its children."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not (pids := set(children(os.getpid())) - keep):
            return
        for pid in pids:
            _end(pid)
        time.sleep(POLL_S)


def _end(pid: int) -> None:
    """By pid, never `waitpid(-1)`: the status of a kept child belongs to whoever started it."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)
    except (ProcessLookupError, ChildProcessError):
        return
