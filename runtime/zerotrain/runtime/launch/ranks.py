"""The rank processes of one worker as a group: started, signalled, reaped and judged together."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from zerotrain.contract.worker_environment import LaunchSpec
from zerotrain.runtime.launch.container_exit import RankExit
from zerotrain.runtime.launch.cores import with_threads
from zerotrain.runtime.launch.output import Sink
from zerotrain.runtime.launch.process import RankProcess, start_rank
from zerotrain.runtime.launch.rank_table import RankTable


class RankGroup:
    """Group of a worker's ranks. Must be used from the main thread: it owns every child of the launcher."""

    def __init__(self, spec: LaunchSpec, rank_table: RankTable) -> None:
        self._spec = spec
        self._rank_table = rank_table
        self.processes: list[RankProcess] = []

    @property
    def any_running(self) -> bool:
        return any(process.running for process in self.processes)

    def start(self, program: Sequence[str], *, environ: Mapping[str, str], socket_path: Path) -> None:
        """Start every rank of the worker. Raises OSError when the system lacks the resources for one."""
        sink = Sink(sys.stdout.buffer)
        environ = with_threads(environ, len(self._spec.ranks))
        for rank in self._spec.ranks:
            process = start_rank(
                self._spec, rank, program, environ=environ, socket_path=socket_path, sink=sink
            )
            self.processes.append(process)
            self._rank_table.set_running(rank, True)

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.signal(number)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def reap(self) -> None:
        """Reap every child that has ended, orphans too (SIGCHLDs merge)."""
        by_pid = {process.popen.pid: process for process in self.processes if process.running}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if process := by_pid.get(pid):
                process.reaped(os.waitstatus_to_exitcode(status), time.monotonic())
                self._rank_table.set_running(process.rank, False)

    def join_output(self, timeout_s: float) -> None:
        """Wait for the rest of the output; another process may still hold a rank's pipe open."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.pump.join(max(0.0, deadline - time.monotonic()))

    def last_line(self, rank: int) -> str | None:
        return next((process.pump.last_line for process in self.processes if process.rank == rank), None)

    def runs(self, rank: int) -> bool:
        return any(process.running for process in self.processes if process.rank == rank)

    def exits(self) -> list[RankExit]:
        """Return how the ranks that have ended did so."""
        return [
            RankExit(
                rank=process.rank,
                status=process.status,
                at=process.ended_at,
                killed_by_launcher=process.killed_by_launcher and process.status == -signal.SIGKILL,
                failure_reported_at=self._rank_table.failure_of(process.rank)[1],
            )
            for process in self.processes
            if process.status is not None
        ]
