"""Talking to the workers' HTTP: by pod IP inside the cluster, through the API server's pod proxy outside.

One small protocol with three implementations; `SilentChannel` is for clusters whose pods run nothing
(simulated nodes), where every job lives by its pods' status alone.

A worker whose packets are dropped holds its caller for seconds, and a tenant may have thousands of those. So
each kind of call has slots of its own, workers that let calls time out have few, and nobody waits for a slot
without end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

import aiohttp

from zerotrain.contract.channel_token import derive, for_reading
from zerotrain.contract.launch import WORKER_HTTP_PORT
from zerotrain.contract.text import one_line
from zerotrain.contract.worker_http import (
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


class ChannelKind(StrEnum):
    DIRECT = "direct"
    PROXY = "proxy"
    SILENT = "silent"


class Lane(StrEnum):
    """Kinds of calls, which do not wait for each other."""

    POLL = "poll"
    """Worker 0 of a job."""
    LOOK = "look"
    """All workers of a job where nothing seems to move."""
    LISTEN = "listen"
    """Workers on nodes that are not ready: a silence counts against them."""
    DOUBTED = "doubted"
    """Polls where earlier ones timed out."""
    SAMPLE = "sample"
    """The first calls of a look at workers that could not be reached in the last one."""
    YIELD = "yield"
    STACKS = "stacks"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Room:
    calls: int
    """At once."""
    of_job: int
    """At once of one job, where it has several."""
    wait_s: float = TIMEOUT_S
    """For a slot: as long as a call may take."""


_ROOMS = {
    Lane.POLL: _Room(calls=20, of_job=1),
    # What was answered in a look is lost when one call gets no slot.
    Lane.LOOK: _Room(calls=20, of_job=10, wait_s=20.0),
    Lane.LISTEN: _Room(calls=24, of_job=16),
    Lane.DOUBTED: _Room(calls=10, of_job=1),
    # Many jobs may be cut off at once, and each of them looks every few minutes.
    Lane.SAMPLE: _Room(calls=10, of_job=5, wait_s=60.0),
    Lane.YIELD: _Room(calls=32, of_job=16),
    # Each may take seconds, and eight jobs at a time are asked.
    Lane.STACKS: _Room(calls=48, of_job=6, wait_s=20.0),
}
CONNECTIONS = sum(room.calls for room in _ROOMS.values())
"""That the session needs: thousands of jobs share one event loop."""


def share_of(lane: Lane) -> int:
    """Calls that one job may make at once."""
    return _ROOMS[lane].of_job


class ChannelError(Exception):
    """The worker did not answer as asked. `final`: asking again cannot help (wrong token, no such path).
    `timed_out`: the call held its slot to the end."""

    def __init__(self, message: str, *, final: bool = False, timed_out: bool = False) -> None:
        super().__init__(one_line(message))  # it may quote the answer of a tenant's program
        self.final, self.timed_out = final, timed_out


class NotAsked(ChannelError):
    """No slot became free in time: nothing is known of the worker, least of all that it is silent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One worker pod as a callee."""

    namespace: str
    pod: str
    ip: str | None
    lane: Lane = Lane.POLL
    """In which its report is asked for."""
    job_uid: str = ""
    attempt: int = 0
    """Whose token goes with the question, where a job is named."""


class WorkerChannel(Protocol):
    """What the operator may ask a worker."""

    async def report(self, worker: Worker) -> WorkerReport:
        """The worker's progress. Raises ChannelError; NotAsked when others took all slots."""

    async def request_yield(self, worker: Worker, *, attempt: int, token: str) -> None:
        """Checkpoint and stop all ranks. Returns once accepted. Raises ChannelError."""

    async def stacks(self, worker: Worker, *, token: str) -> str:
        """The stacks of the worker's ranks. Raises ChannelError."""


class HttpChannel:
    """Both real channels: they differ in the URL and in who is asked to let us through."""

    def __init__(
        self, api: Api, session: aiohttp.ClientSession, kind: ChannelKind, *, operator_key: bytes
    ) -> None:
        """`session` is for the workers alone, for CONNECTIONS of them at once: what they hold must not keep
        the API's own requests waiting."""
        self._api, self._session, self._kind = api, session, kind
        self._operator_key = operator_key
        self._slots = {lane: asyncio.Semaphore(room.calls) for lane, room in _ROOMS.items()}

    async def report(self, worker: Worker) -> WorkerReport:
        # Nobody needs a token to read a report; who shows this one is served before all others.
        headers = {}
        if worker.job_uid:
            headers = bearer(for_reading(derive(self._operator_key, worker.job_uid, worker.attempt)))
        text = await self._call("GET", worker, PROGRESS_PATH, worker.lane, headers)
        try:
            return WorkerReport.from_json(text)
        except ValueError as error:
            raise ChannelError(f"{worker.pod}: {error}") from error

    async def request_yield(self, worker: Worker, *, attempt: int, token: str) -> None:
        await self._call("POST", worker, YIELD_PATH, Lane.YIELD, bearer(token), yield_body(attempt))

    async def stacks(self, worker: Worker, *, token: str) -> str:
        return await self._call("GET", worker, STACKS_PATH, Lane.STACKS, bearer(token))

    async def _call(
        self,
        method: str,
        worker: Worker,
        path: str,
        lane: Lane,
        headers: Mapping[str, str] = MappingProxyType({}),
        body: bytes | None = None,
    ) -> str:
        url, own = await self._route(worker, path)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with (
                self._slot(lane, worker),
                self._session.request(
                    method,
                    url,
                    headers={**headers, **own},
                    data=body,
                    timeout=timeout,
                    allow_redirects=False,
                ) as answer,
            ):
                # A tenant's own program may serve this port: never read more than a report can hold.
                text = await _limited(answer.content, worker)
                if answer.status >= 300:
                    said = text[:200].decode(errors="replace")
                    final = answer.status in (400, 401, 403, 404, 405)
                    raise ChannelError(f"{worker.pod}: {method} {path}: {answer.status} {said}", final=final)
                return text.decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            timed_out = isinstance(error, TimeoutError)
            raise ChannelError(f"{worker.pod}: {method} {path}: {error!r}", timed_out=timed_out) from error

    @asynccontextmanager
    async def _slot(self, lane: Lane, worker: Worker) -> AsyncIterator[None]:
        slots, room = self._slots[lane], _ROOMS[lane]
        try:
            async with asyncio.timeout(room.wait_s):
                await slots.acquire()
        except TimeoutError:
            raise NotAsked(f"{worker.pod} was not asked: all {room.calls} slots ({lane}) are taken") from None
        try:
            yield
        finally:
            slots.release()

    async def _route(self, worker: Worker, path: str) -> tuple[str, dict[str, str]]:
        if self._kind is ChannelKind.DIRECT:
            if worker.ip is None:
                raise ChannelError(f"{worker.pod} has no IP yet")
            host = f"[{worker.ip}]" if ":" in worker.ip else worker.ip
            return f"http://{host}:{WORKER_HTTP_PORT}{path}", {}
        server = self._api.connection.server
        proxy = f"/api/v1/namespaces/{worker.namespace}/pods/{worker.pod}:{WORKER_HTTP_PORT}/proxy{path}"
        # The API server takes its own Authorization out before it passes the request on.
        return server + proxy, await self._api.connection.headers()


async def _limited(content: aiohttp.StreamReader, worker: Worker) -> bytes:
    """The whole body, chunk by chunk: one read gives no more than has arrived. Raises ChannelError."""
    text = bytearray()
    async for chunk in content.iter_any():
        text += chunk
        if len(text) > MAX_REPORT_BYTES:
            raise ChannelError(f"{worker.pod}: the answer is longer than {MAX_REPORT_BYTES} bytes")
    return bytes(text)


class SilentChannel:
    """Workers that nobody can ask."""

    async def report(self, worker: Worker) -> WorkerReport:
        raise ChannelError(f"{worker.pod} is not asked: the channel is off", final=True)

    async def request_yield(self, worker: Worker, *, attempt: int, token: str) -> None:
        raise ChannelError(f"{worker.pod} is not asked: the channel is off", final=True)

    async def stacks(self, worker: Worker, *, token: str) -> str:
        raise ChannelError(f"{worker.pod} is not asked: the channel is off", final=True)
