"""Decides, from how the ranks ended, the exit code of the container and the rank to blame. Pure."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from zerotrain.contract.exit_codes import ExitCode, RetryClass, meaning_of

NOT_FAILURES = frozenset({ExitCode.DONE, ExitCode.YIELDED})

NEVER_AN_ECHO = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
"""Signals that the loss of a peer does not cause; it may cause SIGABRT (a collective's watchdog) and
SIGTERM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExit:
    """End of one rank process. Times are of one monotonic clock."""

    rank: int
    status: int
    """Status as from os.waitstatus_to_exitcode: a code, or minus the signal."""
    at: float
    killed_by_launcher: bool = False
    """Whether the launcher's SIGKILL ended it, so that its status has no meaning."""
    failure_reported_at: float | None = None
    """Time at which the rank announced, over the channel, that it was about to fail."""

    @property
    def code(self) -> int:
        return 128 - self.status if self.status < 0 else self.status

    @property
    def signal(self) -> int | None:
        return -self.status if self.status < 0 else None

    @property
    def failed(self) -> bool:
        return self.code not in NOT_FAILURES

    @property
    def is_certainly_a_cause(self) -> bool:
        """Whether this end cannot be a consequence of a peer's end.

        A killed process closes its sockets before its parent is notified of its end, so that a peer may
        report the lost connection first; the times alone would blame the peer.
        """
        if self.signal is not None:
            return self.signal in NEVER_AN_ECHO
        return meaning_of(self.code).retry in (RetryClass.NEVER, RetryClass.ANOTHER_NODE_ONCE)

    @property
    def failed_at(self) -> float:
        """Time of the failure: a rank that reports one and then waits for its peers may end after them, yet
        it failed first."""
        return self.at if self.failure_reported_at is None else min(self.at, self.failure_reported_at)


def spoils(exits: Sequence[RankExit]) -> bool:
    """Return whether, after a request to stop, a rank of the user's own program failed by itself.

    A rank that SIGTERM ended does not count, nor a peer that lost its connection to such a rank: another rank
    may be saving for all of them, and has the whole grace period for it.
    """
    left_at = min((rank.at for rank in exits if rank.code == ExitCode.TERMINATED), default=math.inf)
    failed = (rank for rank in exits if rank.failed and rank.code != ExitCode.TERMINATED)
    return any(rank.is_certainly_a_cause or rank.failed_at < left_at for rank in failed)


def decide(
    exits: Sequence[RankExit],
    *,
    stop_requested: bool = False,
    grace_ran_out: bool = False,
    own_program: bool = False,
) -> tuple[int, tuple[RankExit, ...]]:
    """Return the exit code of the container, once every rank has ended, and the ranks that failed by
    themselves: the one to blame first, the others in the order of their failures. Where the launcher killed
    ranks and none failed by itself, the first of those is to blame.

    `stop_requested`: the launcher sent SIGTERM to the ranks. Where one of them yielded, its checkpoint serves
    all ranks, and those that just ended are not failures.

    `grace_ran_out`: a stop was requested and the launcher killed the ranks that did not stop in time.

    `own_program`: the ranks run the user's own program, one of which may save for all. Ends that `spoils`
    does not count, and that left that rank its grace period, are not failures either.
    """
    failed = [rank for rank in exits if rank.failed and not rank.killed_by_launcher]
    if stop_requested and any(rank.code == ExitCode.YIELDED for rank in exits):
        by_itself = any(rank.code != ExitCode.TERMINATED for rank in failed)
        failed = failed if (spoils(failed) if own_program else by_itself) else []
    if failed:
        causes = [rank for rank in failed if rank.is_certainly_a_cause]
        first = min(causes or failed, key=_order)
        others = sorted((rank for rank in failed if rank is not first), key=_order)
        return first.code, (first, *others)
    killed = [rank for rank in exits if rank.killed_by_launcher]
    if killed:
        first = min(killed, key=_order)
        code = ExitCode.TERMINATED if grace_ran_out else ExitCode.KILLED
        return int(code), (first,)
    if any(rank.code == ExitCode.YIELDED for rank in exits):
        return int(ExitCode.YIELDED), ()
    return int(ExitCode.DONE), ()


def _order(rank: RankExit) -> tuple[float, int]:
    return rank.failed_at, rank.rank
