"""Lines of a job's ranks: from the pods that exist, merged by time; otherwise the lines that were kept of a
failure.

A pod that cannot be read, such as one on a dead node, is reported and leaves the others readable.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from zerotrain.client.errors import ClientError, NoLogsError, NotFoundError, UnreachableError
from zerotrain.client.job import Job, command
from zerotrain.client.log_follow import Follower
from zerotrain.client.log_stream import (
    LogRequest,
    Place,
    concerns_all,
    pod_lines,
    rank_of,
    trouble,
    with_logs,
)
from zerotrain.client.observed import LogLine, Pod
from zerotrain.operator.api.status import MAX_FAILURES, FailureRecord
from zerotrain.operator.constants import LABEL_ATTEMPT, LABEL_JOB

if TYPE_CHECKING:
    from zerotrain.client.reading import JobReader

MAX_MERGED = 64
"""Maximum of logs that are open at once; those of more workers are read in groups, one after another."""

KEPT_LINES = 100
"""Limit of the operator on kept lines, from `cluster.actions.diagnostics`, which a client does not import."""

_MASKED_COLOURS = re.compile(r"\?\[[0-9;]{0,40}m")
"""Remains of colour sequences after the operator has masked control characters."""

_KEPT_KEY = re.compile(r"attempt-(\d+)\.log")
_EARLIEST = datetime.min.replace(tzinfo=UTC)


def read_logs(reader: JobReader, name: str, request: LogRequest) -> Iterator[LogLine]:
    """Iterate over the requested lines. Raises NoLogsError at the first of them."""
    job = reader.get(name)
    attempt = request.attempt if request.attempt is not None else job.attempt
    pods = with_logs(reader.pods(name, attempt), job, request)
    if request.follow and not job.is_finished and attempt == job.attempt:
        yield from Follower(reader, job, request).lines()
        return
    if pods and not (yield from _all_lines(reader, job, pods, request)):
        return
    yield from _kept(reader, job, attempt, request)


def _all_lines(
    reader: JobReader, job: Job, pods: list[Pod], request: LogRequest
) -> Generator[LogLine, None, bool]:
    """Iterate over the existing lines, merged by time within groups of MAX_MERGED pods. Return whether all
    pods were deleted meanwhile. If none can be read, raise the error of the first one."""
    errors: list[ClientError] = []
    shown = False
    for start in range(0, len(pods), MAX_MERGED):
        with ExitStack() as stack:
            streams = [
                _tail(_readable(reader, job, pod, request, stack, errors), request)
                for pod in pods[start : start + MAX_MERGED]
            ]
            for line in heapq.merge(*streams, key=_when):
                shown = True
                yield line
    if len(errors) < len(pods) or shown:
        return False
    if all(isinstance(error, NotFoundError) for error in errors):
        return True
    raise next(error for error in errors if not isinstance(error, NotFoundError))


def _readable(
    reader: JobReader,
    job: Job,
    pod: Pod,
    request: LogRequest,
    stack: ExitStack,
    errors: list[ClientError],
) -> Iterator[LogLine]:
    """Iterate over the lines of one pod, as far as they can be read."""
    try:
        yield from pod_lines(reader, job, pod, request, Place(), stack)
    except ClientError as error:
        if concerns_all(error):
            raise
        if isinstance(error, UnreachableError):
            reader.get(job.name)  # raises if the API server itself does not answer
        errors.append(error)
        request.on_problem(trouble(pod, error))


def _when(line: LogLine) -> datetime:
    return line.time or _EARLIEST


def _tail(lines: Iterator[LogLine], request: LogRequest) -> Iterator[LogLine]:
    """Keep the last lines of each rank, if ranks were chosen; the API server counts over all ranks of a
    pod."""
    if request.tail is None or request.ranks is None or request.follow:
        return lines
    last: dict[int | None, deque[tuple[int, LogLine]]] = {}
    for number, line in enumerate(lines):
        last.setdefault(line.rank, deque(maxlen=request.tail)).append((number, line))
    return (line for _, line in heapq.merge(*last.values(), key=lambda item: item[0]))


def _kept(reader: JobReader, job: Job, attempt: int, request: LogRequest) -> Iterator[LogLine]:
    """Iterate over the last lines of the rank that failed, from the ConfigMap of the job's failures."""
    try:
        texts = reader.config_map(f"{job.name}-failures")
    except NotFoundError:
        texts = {}
    attempts = {int(found[1]): key for key in texts if (found := _KEPT_KEY.fullmatch(key))}
    asked = attempt
    if request.attempt is None and attempts and attempt not in attempts:
        attempt = max(attempts)
    key = attempts.get(attempt)
    if key is None:
        raise _no_logs(reader, job, attempt, sorted(attempts))
    failure = next((item for item in job.failures if item.attempt == attempt), None)
    request.on_problem(_what_is_left(job, asked, attempt, failure))
    worker = failure.rank // job.ranks_per_worker if failure and failure.rank is not None else 0
    pod = failure.pod if failure is not None else ""
    last = deque[LogLine](maxlen=request.tail)
    for text in texts[key].splitlines()[1:]:  # the first line is the operator's title
        rank, rest = rank_of(_MASKED_COLOURS.sub("", text))
        rank = rank if rank is not None else 0 if worker == 0 else None
        line = LogLine(attempt=attempt, pod=pod, worker=worker, rank=rank, text=rest, kept=True)
        if request.wants(line):
            last.append(line)
    yield from last


def _what_is_left(job: Job, asked: int, attempt: int, failure: FailureRecord | None) -> str:
    """Return a message about the lines that are shown instead of the requested ones, and where the others may
    be."""
    gone = f"attempt {asked} has no pods any more"
    if asked != attempt:
        gone += ", and nothing of it was kept"
    who = "one rank" if failure is None else f"pod {failure.pod}"
    if failure is not None and failure.rank is not None:
        who = f"rank {failure.rank}"
    elif failure is not None and failure.container:
        who = f"init container {failure.container} of pod {failure.pod}"
    return (
        f"{gone}; only the last lines (up to {KEPT_LINES}) of {who}, which failed in attempt {attempt}, "
        f"were kept. {elsewhere(job, attempt)}"
    )


def elsewhere(job: Job, attempt: int) -> str:
    """Return a message about where lines of deleted pods may be found."""
    return (
        "A log collector of the cluster, if there is one, has all other lines: select the pods in "
        f"namespace {job.namespace} with the labels {LABEL_JOB}={job.name} and {LABEL_ATTEMPT}={attempt}"
    )


def _no_logs(reader: JobReader, job: Job, attempt: int, kept: list[int]) -> NoLogsError:
    waiting = [pod for pod in reader.pods(job.name, attempt) if not pod.started and pod.worker is not None]
    if waiting:
        pod = waiting[0]
        why = f" ({pod.reason}: {pod.message})" if pod.reason else ""
        return NoLogsError(
            f"no worker of attempt {attempt} has started; pod {pod.name} waits{why}",
            next_step=command(job, "describe"),
        )
    if attempt == 0:
        return NoLogsError(
            f"{job.name} has not started yet: it is {job.phase or 'new'}",
            next_step=command(job, "describe"),
        )
    available = f"; lines were kept of attempts {', '.join(map(str, kept))}" if kept else ""
    step = command(job, "logs", f"--attempt {kept[-1]}") if kept else command(job, "describe")
    return NoLogsError(
        f"attempt {attempt} of {job.name} has no pods any more, and no lines of it were kept{available}\n"
        f"The operator keeps the last {KEPT_LINES} lines of the rank that failed, of the newest "
        f"{MAX_FAILURES} attempts with one. {elsewhere(job, attempt)}",
        next_step=step,
    )
