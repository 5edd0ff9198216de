"""HTTP client of the workers: by pod IP inside the cluster, through the API server's pod proxy outside.

There is one small protocol with two implementations. `SilentChannel` is for clusters whose pods run nothing
(simulated nodes), where every job is judged by the status of its pods alone.

A worker whose packets are dropped holds its caller for seconds, and a tenant may have thousands of those. So
each kind of call has slots of its own, workers whose calls time out have few, and the wait for a slot has a
limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import aiohttp

from zerotrain.contract.channel_token import derive, for_reading
from zerotrain.contract.text import one_line
from zerotrain.contract.worker_environment import WORKER_HTTP_PORT
from zerotrain.contract.worker_http import (
    MAX_STACKS_BYTES,
    PROGRESS_PATH,
    STACKS_PATH,
    YIELD_PATH,
    WorkerReport,
    bearer,
    yield_body,
)
from zerotrain.operator.cluster.api import Api

TIMEOUT_S = 5.0
MAX_REPORT_BYTES = 1 << 20
LARGE_REPORT_BYTES = 16 << 10
"""Bytes of a report from which on it is parsed beside the event loop: a tenant may have hundreds of workers
that send as much as is read."""
MAX_REPORT_COMMAS = 50_000
"""Maximum number of commas in a report, several times those of 64 ranks that rejected checkpoints. A megabyte
of small values takes a third of a second to parse, whatever they are."""


class ChannelKind(StrEnum):
    DIRECT = "direct"
    PROXY = "proxy"
    SILENT = "silent"


class CallKind(StrEnum):
    """Kinds of calls, which do not wait for each other."""

    POLL = "poll"
    """Poll of worker 0 of a job."""
    INSPECT = "inspect"
    """Inspection of all workers of a job that seems to stand still."""
    PROBE = "probe"
    """Calls to workers on nodes that are not ready: silence counts against the node."""
    UNRESPONSIVE = "unresponsive"
    """Polls of a worker whose earlier calls timed out."""
    SAMPLE = "sample"
    """First calls of an inspection of workers that could not be reached in the last one."""
    YIELD = "yield"
    STACKS = "stacks"


@dataclass(frozen=True, kw_only=True, slots=True)
class _CallLimits:
    calls: int
    """Maximum of calls in flight."""
    of_job: int
    """Maximum of calls in flight of one job, where it has several."""
    wait_s: float = TIMEOUT_S
    """Maximum seconds to wait for a slot; by default the time that a call may take."""


_CALL_LIMITS = {
    CallKind.POLL: _CallLimits(calls=20, of_job=1),
    # The answers of an inspection are lost when one call gets no slot.
    CallKind.INSPECT: _CallLimits(calls=20, of_job=10, wait_s=20.0),
    CallKind.PROBE: _CallLimits(calls=24, of_job=16),
    CallKind.UNRESPONSIVE: _CallLimits(calls=10, of_job=1),
    # Many jobs may be cut off at once, and each of them is inspected every few minutes.
    CallKind.SAMPLE: _CallLimits(calls=10, of_job=5, wait_s=60.0),
    CallKind.YIELD: _CallLimits(calls=32, of_job=16),
    # Each call may take seconds, and stacks of eight jobs are collected at a time.
    CallKind.STACKS: _CallLimits(calls=48, of_job=6, wait_s=20.0),
}
CONNECTIONS = sum(limits.calls for limits in _CALL_LIMITS.values())
"""Connections that the session needs: thousands of jobs share one event loop."""


def share_of(call_kind: CallKind) -> int:
    """Return how many calls of the kind one job may make at once."""
    return _CALL_LIMITS[call_kind].of_job


class ChannelError(Exception):
    """Error of a worker that did not answer as requested. `final`: another call cannot help (wrong token, no
    such path). `timed_out`: the call held its slot to the end."""

    def __init__(self, message: str, *, final: bool = False, timed_out: bool = False) -> None:
        super().__init__(one_line(message))  # it may quote the answer of a tenant's program
        self.final, self.timed_out = final, timed_out


class NotAsked(ChannelError):
    """Error of a call that got no slot in time: nothing is known of the worker, and it does not count as
    silent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerAddress:
    """Address of one worker pod, with the kind and the token of the calls to it."""

    namespace: str
    pod: str
    ip: str | None
    call_kind: CallKind = CallKind.POLL
    """Kind of the calls for its report."""
    job_uid: str = ""
    attempt: int = 0
    """Attempt whose token is sent with the call, if `job_uid` is given."""


class WorkerChannel(Protocol):
    """Calls that the operator makes to a worker."""

    async def report(self, worker: WorkerAddress) -> WorkerReport:
        """Return the worker's progress. Raises ChannelError; NotAsked when other calls held all slots."""

    async def request_yield(self, worker: WorkerAddress, *, attempt: int, token: str) -> None:
        """Make all ranks checkpoint and stop. Returns once the worker has accepted. Raises ChannelError."""

    async def stacks(self, worker: WorkerAddress, *, token: str) -> str:
        """Return the stacks of the worker's ranks. Raises ChannelError."""


class HttpChannel:
    """Client of the workers' HTTP, for both real channels. They differ in the URL and in the component that
    authorises the call."""

    def __init__(
        self, api: Api, session: aiohttp.ClientSession, kind: ChannelKind, *, operator_key: bytes
    ) -> None:
        """`session` serves the workers alone and allows CONNECTIONS connections: workers that hang must not
        delay requests to the API server."""
        self._api, self._session, self._kind = api, session, kind
        self._operator_key = operator_key
        self._slots = {
            call_kind: asyncio.Semaphore(limits.calls) for call_kind, limits in _CALL_LIMITS.items()
        }
        self._parsing = asyncio.Semaphore(1)
        """Semaphore for the parsing of large reports. One at a time: two would only slow each other down."""

    async def report(self, worker: WorkerAddress) -> WorkerReport:
        # Reading a report needs no token. A caller with this token is served before all others.
        headers = {}
        if worker.job_uid:
            headers = bearer(for_reading(derive(self._operator_key, worker.job_uid, worker.attempt)))
        # The slot is kept until the report is parsed: this bounds the number of those that wait.
        async with self._slot(worker.call_kind, worker):
            text = await self._call("GET", worker, PROGRESS_PATH, headers)
            try:
                return await self._parsed(text)
            except ValueError as error:
                raise ChannelError(f"{worker.pod}: {error}") from error

    async def request_yield(self, worker: WorkerAddress, *, attempt: int, token: str) -> None:
        async with self._slot(CallKind.YIELD, worker):
            await self._call("POST", worker, YIELD_PATH, bearer(token), yield_body(attempt))

    async def stacks(self, worker: WorkerAddress, *, token: str) -> str:
        async with self._slot(CallKind.STACKS, worker):
            text = await self._call("GET", worker, STACKS_PATH, bearer(token), limit=MAX_STACKS_BYTES)
            return text.decode(errors="replace")

    async def _parsed(self, text: bytes) -> WorkerReport:
        if len(text) < LARGE_REPORT_BYTES:
            return _report(text)
        async with self._parsing:
            return await asyncio.to_thread(_report, text)

    async def _call(
        self,
        method: str,
        worker: WorkerAddress,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        limit: int = MAX_REPORT_BYTES,
    ) -> bytes:
        url, own = await self._route(worker, path)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._session.request(
                method,
                url,
                headers={**headers, **own},
                data=body,
                timeout=timeout,
                allow_redirects=False,
            ) as answer:
                # A tenant's own program may serve this port: never read more than an answer can hold.
                text = await _limited(answer.content, worker, limit)
                if answer.status >= 300:
                    excerpt = text[:200].decode(errors="replace")
                    final = answer.status in (400, 401, 403, 404, 405)
                    raise ChannelError(
                        f"{worker.pod}: {method} {path}: {answer.status} {excerpt}", final=final
                    )
                return text
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            timed_out = isinstance(error, TimeoutError)
            raise ChannelError(f"{worker.pod}: {method} {path}: {error!r}", timed_out=timed_out) from error

    @asynccontextmanager
    async def _slot(self, call_kind: CallKind, worker: WorkerAddress) -> AsyncIterator[None]:
        slots, limits = self._slots[call_kind], _CALL_LIMITS[call_kind]
        try:
            async with asyncio.timeout(limits.wait_s):
                await slots.acquire()
        except TimeoutError:
            raise NotAsked(
                f"{worker.pod} was not called: all {limits.calls} slots of kind {call_kind} are in use"
            ) from None
        try:
            yield
        finally:
            slots.release()

    async def _route(self, worker: WorkerAddress, path: str) -> tuple[str, dict[str, str]]:
        if self._kind is ChannelKind.DIRECT:
            if worker.ip is None:
                raise ChannelError(f"{worker.pod} has no IP yet")
            host = f"[{worker.ip}]" if ":" in worker.ip else worker.ip
            return f"http://{host}:{WORKER_HTTP_PORT}{path}", {}
        server = self._api.connection.server
        proxy = f"/api/v1/namespaces/{worker.namespace}/pods/{worker.pod}:{WORKER_HTTP_PORT}/proxy{path}"
        # The API server removes the Authorization header before it passes the request on.
        return server + proxy, await self._api.connection.headers()


def _report(text: bytes) -> WorkerReport:
    """Parse a report. Raises ValueError."""
    if text.count(b",") > MAX_REPORT_COMMAS:
        raise ValueError(f"a worker report has at most {MAX_REPORT_COMMAS} commas")
    return WorkerReport.from_json(text.decode(errors="replace"))


async def _limited(content: aiohttp.StreamReader, worker: WorkerAddress, limit: int) -> bytes:
    """Read the whole body, chunk by chunk: one read returns no more than has arrived. Raises ChannelError
    when it is too long."""
    text = bytearray()
    async for chunk in content.iter_any():
        text += chunk
        if len(text) > limit:
            raise ChannelError(f"{worker.pod}: the answer is longer than {limit} bytes")
    return bytes(text)


class SilentChannel:
    """Channel to workers that cannot be called."""

    async def report(self, worker: WorkerAddress) -> WorkerReport:
        raise ChannelError(f"{worker.pod} is not called: the channel is off", final=True)

    async def request_yield(self, worker: WorkerAddress, *, attempt: int, token: str) -> None:
        raise ChannelError(f"{worker.pod} is not called: the channel is off", final=True)

    async def stacks(self, worker: WorkerAddress, *, token: str) -> str:
        raise ChannelError(f"{worker.pod} is not called: the channel is off", final=True)
