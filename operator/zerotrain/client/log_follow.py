"""Follower of logs (`zerotrain logs -f`): lines of all workers as they come, across broken connections and
new attempts."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from zerotrain.client.errors import (
    ClientError,
    JobNotFoundError,
    NotFoundError,
    ServerError,
    TooManyLogsError,
    UnreachableError,
)
from zerotrain.client.job import Job, command
from zerotrain.client.log_stream import LogRequest, Place, concerns_all, pod_lines, trouble, with_logs
from zerotrain.client.observed import LogLine, Pod
from zerotrain.client.waiting import PATIENCE_S
from zerotrain.client.watching import Watched
from zerotrain.operator.constants import LABEL_JOB

if TYPE_CHECKING:
    from zerotrain.client.reading import JobReader

LOOK_EVERY_S = 2.0
"""Seconds between two checks whether the watch has reported new pods; no request is sent for that."""

FAST_LOOK_S = 0.2
"""Seconds until the next check once all logs have ended: the next attempt is near."""

MAX_PAUSE_S = 30.0
"""Maximum seconds between two tries to open a log that cannot be read."""

MAX_QUEUED = 10_000

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class _Tap:
    """Log of one pod with the state of the thread that reads it."""

    pod: Pod
    place: Place = field(default_factory=Place)
    running: bool = False
    done: bool = False
    """Whether the log was read to the end of its container."""
    is_last_try: bool = False
    troubled: bool = False
    pause_s: float = field(default_factory=lambda: LOOK_EVERY_S)
    opened_at: float = 0.0

    def is_due(self, *, is_last: bool) -> bool:
        """Return whether to open the log now. With `is_last`, when no more lines can come, it is opened once
        more."""
        if self.running or self.done or self.is_last_try:
            return False
        self.is_last_try = is_last
        return is_last or not self.opened_at or time.monotonic() >= self.opened_at + self.pause_s


class Follower:
    """Follower of one job; `lines` may be called once."""

    def __init__(self, reader: JobReader, job: Job, request: LogRequest) -> None:
        self._reader, self._job, self._request = reader, job, request
        self._taps: dict[str, _Tap] = {}
        self._queue: queue.Queue[LogLine | ClientError | str | None] = queue.Queue(maxsize=MAX_QUEUED)
        self._stop = threading.Event()
        self._unavailable_since: float | None = None
        self._pods: dict[str, Pod] = {}
        self._reported_attempt = 0

    def lines(self) -> Iterator[LogLine]:
        """Iterate over lines as they come, of this attempt and, unless one was requested, of later ones.

        Raises TooManyLogsError.
        """
        check_number(self._job, self._request)
        threading.Thread(target=self._watch_pods, name="pods", daemon=True).start()
        is_last, idle_s = False, FAST_LOOK_S
        try:
            while True:
                self._open(is_last=is_last)
                busy = self._is_busy()
                idle_s = FAST_LOOK_S if busy else min(2 * idle_s, LOOK_EVERY_S)
                yield from self._drain(LOOK_EVERY_S if busy or not self._taps else idle_s)
                if self._is_busy():
                    continue
                yield from self._drain(0.0)
                if is_last:
                    return
                try:
                    is_last = self._is_over()
                except JobNotFoundError:
                    return
        finally:
            self._stop.set()

    def _open(self, *, is_last: bool) -> None:
        """Read the logs of new pods, and of those whose connection ended before their container did."""
        if is_last:  # the watch may lag behind the job's end
            listed = self._patiently(lambda: self._reader.pods(self._job.name))
            self._pods = {pod.name: pod for pod in listed} if listed is not None else self._pods
        for pod in self._chosen():
            tap = self._taps.setdefault(pod.name, _Tap(pod=pod))
            if not tap.is_due(is_last=is_last):
                continue
            tap.pod, tap.running, tap.opened_at = pod, True, time.monotonic()
            threading.Thread(target=self._pump, args=(tap,), name="log", daemon=True).start()

    def _chosen(self) -> list[Pod]:
        """Return the pods of the attempt whose lines are wanted, as many as may be followed."""
        request, job = self._request, self._job
        attempt = request.attempt if request.attempt is not None else job.attempt
        known = (pod for pod in list(self._pods.values()) if pod.attempt == attempt)
        pods = sorted(with_logs(known, job, request), key=lambda pod: pod.worker or 0)
        if len(pods) > request.max_followed and self._reported_attempt != attempt:
            self._reported_attempt = attempt
            request.on_problem(
                f"attempt {attempt} has {len(pods)} workers; followed: the first {request.max_followed}"
            )
        return pods[: request.max_followed]

    def _watch_pods(self) -> None:
        """Keep `_pods` equal to the API server's state, with one request for as long as it lasts."""
        job = self._job
        watched = Watched(
            self._reader.transport,
            f"/api/v1/namespaces/{job.namespace}/pods",
            {"labelSelector": f"{LABEL_JOB}={job.name}"},
            what=f"pods of {job.name}",
            patience_s=PATIENCE_S,
            on_problem=self._hint,
        )
        try:
            for batch in watched.batches():
                names = {key.partition("/")[2]: raw for key, raw in batch.items()}
                kept = {name: pod for name, pod in self._pods.items() if name not in names}
                self._pods = kept | {name: Pod.of(raw) for name, raw in names.items() if raw is not None}
                if self._stop.is_set():
                    return
        except ClientError as error:
            self._put(error)

    def _is_busy(self) -> bool:
        return any(tap.running for tap in self._taps.values())

    def _is_over(self) -> bool:
        """Return whether no more lines will come. Raises JobNotFoundError."""
        job = self._patiently(lambda: self._reader.get(self._job.name))
        if job is None:
            return False
        self._job, asked = job, self._request.attempt
        over = asked is not None and job.attempt != asked
        return job.is_finished or over or job.phase in ("Suspended", "Stalled")

    def _patiently(self, ask: Callable[[], T]) -> T | None:
        """Return the result of `ask`, or None while the API server is unavailable. Raises its error after
        PATIENCE_S."""
        try:
            found = ask()
        except (UnreachableError, ServerError):
            now = time.monotonic()
            self._unavailable_since = self._unavailable_since if self._unavailable_since is not None else now
            if now > self._unavailable_since + PATIENCE_S:
                raise
            return None
        self._unavailable_since = None
        return found

    def _pump(self, tap: _Tap) -> None:
        """Put one pod's lines into the queue until its container or the connection ends."""
        ended = tap.pod.exit_code is not None or tap.pod.phase in ("Succeeded", "Failed")
        try:
            with ExitStack() as stack:
                for line in pod_lines(self._reader, self._job, tap.pod, self._request, tap.place, stack):
                    tap.troubled, tap.pause_s = False, LOOK_EVERY_S
                    if not self._put(line):
                        return
            # While the container runs, only the connection has ended.
            tap.done = ended
        except NotFoundError:
            tap.done = True  # the pod was deleted between the list and the request
        except ClientError as error:
            tap.pause_s = min(2 * tap.pause_s, MAX_PAUSE_S)
            if concerns_all(error):
                self._put(error)
            elif not tap.troubled:
                self._put(trouble(tap.pod, error))
            tap.troubled = True
        finally:
            tap.running = False
            self._put(None)

    def _put(self, item: LogLine | ClientError | str | None) -> bool:
        """Wait for space in the queue and add the item. Return False once the reader has stopped."""
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.5)
            except queue.Full:
                continue
            return True
        return False

    def _hint(self, text: str) -> None:
        self._put(text)

    def _drain(self, wait_s: float) -> Iterator[LogLine]:
        """Iterate over the lines in the queue, and those that come within `wait_s` seconds while a log is
        open. Raises an error that concerns all logs."""
        deadline = time.monotonic() + wait_s
        while wait_s == 0 or time.monotonic() < deadline:
            try:
                item = self._queue.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                return
            if isinstance(item, ClientError):
                raise item
            if isinstance(item, str):
                self._request.on_problem(item)
            elif item is not None:
                yield item
            elif wait_s and not self._is_busy():
                return


def check_number(job: Job, request: LogRequest) -> None:
    """Raise TooManyLogsError if more workers are requested than may be followed at once."""
    workers = set(range(job.num_workers))
    if request.ranks is not None:
        workers &= {rank // job.ranks_per_worker for rank in request.ranks}
    if len(workers) <= request.max_followed:
        return
    last = request.max_followed * job.ranks_per_worker - 1
    fewer = f"--rank 0-{last} -f" if last else "--rank 0 -f"
    raise TooManyLogsError(
        f"{len(workers)} workers of {job.name} would be followed at once, and the limit is "
        f"{request.max_followed}: each takes a connection to the API server",
        next_step=f"choose ranks: {command(job, 'logs', fewer)}; or raise the limit: "
        f"--max-log-requests {len(workers)}",
    )
