"""Log of one pod, line by line: `logs` uses it for existing lines, `log_follow` for new ones.

A worker's pod holds the lines of all its ranks; the launcher marks those of every rank but 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from zerotrain.client.errors import ClientError, ForbiddenError, UnauthenticatedError
from zerotrain.client.job import Job
from zerotrain.client.observed import LogLine, Pod
from zerotrain.client.watching import lines_of

if TYPE_CHECKING:
    from zerotrain.client.reading import JobReader

SPARE_LINES = 4
"""Factor by which more lines of the pod are requested, per rank of the worker, to find the last lines of one
rank."""

MAX_FOLLOWED = 64

READ_TIMEOUT_S = 60.0
"""Seconds between two chunks of a log that is not followed."""

_RANK = re.compile(r"\[rank (\d{1,7})\] ")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d) ")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRequest:
    """Selection of lines."""

    ranks: frozenset[int] | None
    attempt: int | None
    follow: bool
    tail: int | None
    max_followed: int
    """Maximum of logs that are followed at once: each takes a thread here and a connection to the API
    server."""
    on_problem: Callable[[str], None]
    """Function that is called for a pod whose log cannot be read, while the other logs go on."""

    def wants(self, line: LogLine) -> bool:
        return self.ranks is None or line.rank in self.ranks


@dataclass(kw_only=True, slots=True)
class Place:
    """Position up to which the log of a pod was read, over several connections."""

    newest: datetime | None = None
    at_newest: int = 0
    """Number of lines with exactly the newest time."""
    unstamped: int = 0
    _again: int = 0
    """Number of lines of the newest time (or, without any time, of all lines) that will come a second
    time."""

    def reopen(self) -> None:
        """Prepare for a new connection, which repeats lines: the API server selects by whole seconds only."""
        self._again = self.at_newest if self.newest is not None else self.unstamped

    def take(self, line: LogLine) -> bool:
        """Return whether the line is new."""
        if line.time is None or (self.newest is not None and line.time <= self.newest):
            if self._again:
                self._again -= line.time == self.newest
                return False
            self.unstamped += line.time is None
            self.at_newest += line.time is not None and line.time == self.newest
            return True
        self.newest, self.at_newest, self._again = line.time, 1, 0
        return True


def concerns_all(error: ClientError) -> bool:
    """Return whether the logs of the other pods cannot be read either."""
    return isinstance(error, ForbiddenError | UnauthenticatedError)


def trouble(pod: Pod, error: ClientError) -> str:
    """Return one line about a log that cannot be read."""
    where = f" on node {pod.node}" if pod.node else ""
    return f"logs of pod {pod.name}{where} cannot be read: {' '.join(str(error).split())}"


def with_logs(pods: Iterable[Pod], job: Job, request: LogRequest) -> list[Pod]:
    """Return the workers that have started and that hold one of the requested ranks."""
    each = job.ranks_per_worker
    wanted = None if request.ranks is None else {rank // each for rank in request.ranks}
    return [
        pod
        for pod in pods
        if pod.worker is not None and pod.started and (wanted is None or pod.worker in wanted)
    ]


def pod_lines(
    reader: JobReader, job: Job, pod: Pod, request: LogRequest, place: Place, stack: ExitStack
) -> Iterator[LogLine]:
    """Iterate over the requested lines of one pod from `place` on. Each line carries the newest time so far,
    so that a merge by time keeps the order of the pod's lines."""
    query = {"container": pod.container, "timestamps": "true"}
    if request.follow:
        query["follow"] = "true"
    if place.newest is not None:
        query["sinceTime"] = f"{place.newest.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    elif request.tail is not None:
        spare = SPARE_LINES * job.ranks_per_worker if request.ranks is not None else 1
        query["tailLines"] = str(request.tail * spare)
    place.reopen()
    path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/log"
    timeout_s = None if request.follow else READ_TIMEOUT_S
    chunks = stack.enter_context(
        reader.transport.stream(path, query, what=f"log of pod {pod.name}", timeout_s=timeout_s)
    )
    for raw in lines_of(chunks):
        line = parse_line(raw.decode(errors="replace"), pod)
        if place.take(line) and request.wants(line):
            yield replace(line, time=place.newest)


def parse_line(text: str, pod: Pod) -> LogLine:
    """Parse one line of a pod's log, with the node's time before it where the kubelet gave one."""
    moment, text = _stamp(text)
    rank, text = rank_of(text)
    if rank is None and pod.worker == 0:
        rank = 0
    worker = pod.worker if pod.worker is not None else -1
    return LogLine(attempt=pod.attempt, pod=pod.name, worker=worker, rank=rank, text=text, time=moment)


def _stamp(text: str) -> tuple[datetime | None, str]:
    found = _STAMP.match(text)
    if found is None:
        return None, text
    whole, fraction, zone = found.groups()
    # The time has nanoseconds, which Python's datetime does not support.
    moment = datetime.fromisoformat(f"{whole}{(fraction or '.0')[:7]}{zone}")
    return moment, text[found.end() :]


def rank_of(text: str) -> tuple[int | None, str]:
    found = _RANK.match(text)
    return (int(found[1]), text[found.end() :]) if found else (None, text)
