"""Messages between the ranks' watchdogs in the store: the ranks' progress and their processes. Used by
`watchdog.py`."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from zerotrain.contract.strict_json import strict_json
from zerotrain.runtime.comm.fd_exchange import host_key
from zerotrain.runtime.comm.mismatch import ENDED, NOTHING, Progress


class RankRecords:
    """Progress of this rank and of the others, in the store."""

    def __init__(self, store: Any, processes: Any, *, rank: int, ranks: Sequence[int], every: float) -> None:
        """Publish this rank's process in the store `processes`, which engines share.

        `ranks`: global ranks of the group; `every`: seconds between two writes that are not urgent.
        """
        self._store, self._shared, self._rank, self._ranks, self._every = store, processes, rank, ranks, every
        self._published: Progress | None = None
        self._published_at = 0.0
        self.last_seen: dict[int, Progress] = {}
        """Result of `of_others` when it was last called."""
        self._host = host_key().hex()
        self._processes: dict[int, tuple[str, int]] = {}
        """Host and pid of the ranks' processes that were looked up."""
        with suppress(RuntimeError, OSError):
            announce_process(processes, ranks[rank])

    def publish(self, mine: Progress) -> None:
        """Write this rank's progress."""
        self._store.set(_key(self._rank), mine.to_json())
        self._published, self._published_at = mine, time.monotonic()

    def keep_up(self, mine: Progress, *, is_urgent: bool) -> None:
        """Write the progress if it changed and is urgent, or if the last write is long ago. The end of the
        data is urgent."""
        before = self._published
        if mine == before:
            return
        published = None if before is None else before.batches
        ended = mine.batches is not None and mine.batches[2] and mine.batches != published
        if is_urgent or ended or time.monotonic() - self._published_at >= self._every:
            self.publish(mine)

    def of_others(self) -> dict[int, Progress]:
        """Return the progress of the other ranks. A rank whose process is gone has ended."""
        found = {}
        for rank in range(len(self._ranks)):
            if rank == self._rank:
                continue
            theirs = NOTHING
            if self._store.check([_key(rank)]):
                theirs = Progress.from_json(self._store.get(_key(rank)).decode())
            if not theirs.end and self._has_ended(rank):
                theirs = replace(theirs, end=ENDED)
            if theirs is not NOTHING:
                found[rank] = theirs
        self.last_seen = found
        return found

    def _has_ended(self, rank: int) -> bool:
        """Return whether the rank's process was on this host and is gone."""
        if rank not in self._processes:
            key = _process_key(self._ranks[rank])
            if not self._shared.check([key]):
                return False
            host, pid = strict_json(self._shared.get(key).decode())
            self._processes[rank] = str(host), int(pid)
        host, pid = self._processes[rank]
        return host == self._host and _is_gone(pid)


def announce_process(processes: Any, global_rank: int) -> None:
    """Publish this process as the one of a rank, so that others see when it is gone."""
    processes.set(_process_key(global_rank), json.dumps([host_key().hex(), os.getpid()]))


def _is_gone(pid: int) -> bool:
    """Return whether a process has ended; True also for a zombie that its parent has not reaped."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:  # the kernel or a seccomp filter does not allow the check
        return False
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(descriptor)


def _key(rank: int) -> str:
    return f"zerotrain-watchdog/{rank}"


def _process_key(rank: int) -> str:
    return f"zerotrain-process/{rank}"
