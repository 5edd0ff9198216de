"""Runs the ranks of one worker, and gives the exit code of the container. Lives in the main thread's loop.

asyncio's own child watchers are not used: PID 1 must reap all orphans with `waitpid(-1)`, which would take
the children of the watchers, too.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.worker_environment import LaunchSpec
from zerotrain.runtime.launch.container_exit import RankExit, decide, spoils
from zerotrain.runtime.launch.log import say
from zerotrain.runtime.launch.rank_table import RankTable
from zerotrain.runtime.launch.ranks import RankGroup
from zerotrain.runtime.launch.rendezvous import wait_for_name
from zerotrain.runtime.launch.shutdown_budget import ShutdownBudget
from zerotrain.runtime.launch.stacks import TIMEOUT_S, collect_stacks


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Time limits of the supervisor, in seconds."""

    peer_grace_s: float = 5.0
    """Time from the first failure to the SIGKILL of the others, in which they may report their reasons; none
    can save without the failed rank. In a user's own program an end by SIGTERM after a request to stop is not
    a failure."""
    failing_rank_s: float = 30.0
    """Time from a rank's announcement that it fails to its end, for one that hangs in its teardown. After it
    the rank counts as ended, unless it has gone on and thereby revoked the announcement."""
    stop_grace_s: float = 120.0
    """Time from the request to stop to the SIGKILL: one step boundary and one checkpoint."""
    exit_margin_s: float = 5.0
    """Time from there to the kubelet's SIGKILL, which also ends the launcher: for stacks, last output and the
    message."""
    output_s: float = 2.0
    """Time for the rest of the ranks' output after their end."""

    @classmethod
    def of(cls, spec: LaunchSpec) -> Limits:
        """Return the limits of a job. The operator reserves some seconds of the pod's grace period for the
        launcher's last messages."""
        return cls(stop_grace_s=spec.grace_seconds, exit_margin_s=spec.exit_margin_seconds)


class Supervisor:
    """Forwards signals, ends the ranks that must not go on, and determines the exit of the container."""

    def __init__(self, spec: LaunchSpec, rank_table: RankTable, *, limits: Limits) -> None:
        self._spec = spec
        self._rank_table = rank_table
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._ranks = RankGroup(spec, rank_table)
        self._all_ended = asyncio.Event()
        self._stop_requested = asyncio.Event()
        self._grace_ran_out = False
        self.shutdown_budget = ShutdownBudget()
        self._collecting: asyncio.Task[str] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def install_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.request_stop)
        self._loop.add_signal_handler(signal.SIGUSR1, self._in_background, self._say_stacks)
        self._loop.add_signal_handler(signal.SIGCHLD, self._child_ended)

    async def run(self, program: Sequence[str], *, environ: Mapping[str, str], socket_path: Path) -> None:
        """Wait for the name, start the ranks, wait for the end of all. Raises RendezvousTimeout, OSError."""
        if await self._name_resolves():
            self._ranks.start(program, environ=environ, socket_path=socket_path)
            await self._all_ended.wait()
            await asyncio.to_thread(
                self._ranks.join_output, self.shutdown_budget.limit(self._limits.output_s)
            )

    def container_exit(self) -> tuple[int, tuple[RankExit, ...]]:
        """Return, after `run`, the exit code of the container and the ranks that failed, as `decide`."""
        exits = self._ranks.exits()
        if not exits:  # a stop came before the ranks were started
            return int(ExitCode.TERMINATED), ()
        return decide(
            exits,
            stop_requested=self._stop_requested.is_set(),
            grace_ran_out=self._grace_ran_out,
            own_program=not self._rank_table.built_in_trainer,
        )

    def request_stop(self) -> None:
        """SIGTERM every rank once: they stop at the same step, checkpoint, and exit 75."""
        if self._stop_requested.is_set():
            return
        self._stop_requested.set()
        self._rank_table.set_stopping()
        self._ranks.signal(signal.SIGTERM)
        self.shutdown_budget.start(self._limits.stop_grace_s + self._limits.exit_margin_s)
        self._loop.call_later(self._limits.stop_grace_s, self._in_background, self._end_after_grace)

    def rank_announced_failure(self, rank: int) -> None:
        """Expect the rank to end by itself; if it hangs instead, end the ranks that its end would end."""
        _, reported_at = self._rank_table.failure_of(rank)

        def end_if_stuck() -> None:
            if self._ranks.runs(rank) and self._rank_table.failure_of(rank)[1] == reported_at:
                end = RankExit(rank=rank, status=1, at=time.monotonic(), failure_reported_at=reported_at)
                if self._none_can_save(end):
                    self._ranks.kill()

        self._loop.call_later(self._limits.failing_rank_s, end_if_stuck)

    def kill(self) -> None:
        """End all ranks, because the launcher itself cannot go on."""
        self._ranks.kill()

    def last_line(self, rank: int) -> str | None:
        return self._ranks.last_line(rank)

    async def stacks(self) -> str:
        """Return the stacks of all ranks; concurrent callers share one collection."""
        if self._collecting is None or self._collecting.done():
            self._collecting = self._loop.create_task(collect_stacks(self._ranks.processes))
        return await asyncio.shield(self._collecting)

    async def _name_resolves(self) -> bool:
        """Wait for the name of rank 0; return False when a stop was requested before it resolved."""
        if _is_address(self._spec.master_addr):
            return not self._stop_requested.is_set()
        waiting = asyncio.ensure_future(
            wait_for_name(
                self._spec.master_addr,
                self._spec.master_port,
                timeout_s=self._spec.rendezvous_timeout_seconds,
            )
        )
        stopped = asyncio.ensure_future(self._stop_requested.wait())
        await asyncio.wait({waiting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not waiting.done():
            waiting.cancel()
            return False
        waiting.result()
        return not self._stop_requested.is_set()

    def _child_ended(self) -> None:
        self._ranks.reap()
        if self._none_can_save():
            self._loop.call_later(self._limits.peer_grace_s, self._ranks.kill)
        if self._ranks.processes and not self._ranks.any_running:
            self._all_ended.set()

    def _none_can_save(self, *more: RankExit) -> bool:
        """Return whether a rank ended in such a way that the others are of no use any more."""
        exits = [*self._ranks.exits(), *more]
        if self._stop_requested.is_set() and not self._rank_table.built_in_trainer:
            return spoils(exits)
        return any(rank.failed for rank in exits)

    async def _end_after_grace(self) -> None:
        if self._ranks.any_running:
            say(f"the ranks did not stop within {self._limits.stop_grace_s:g} s; their stacks:")
            # Not a collection for another caller: it may take longer than the time that is left.
            say(await collect_stacks(self._ranks.processes, timeout_s=self.shutdown_budget.limit(TIMEOUT_S)))
            self._grace_ran_out = True
            self._ranks.kill()

    async def _say_stacks(self) -> None:
        say(await self.stacks())

    def _in_background(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        task = self._loop.create_task(work())
        self._tasks.add(task)  # the loop keeps only a weak reference
        task.add_done_callback(self._tasks.discard)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
