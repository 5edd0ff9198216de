"""Talking to the workers' HTTP: by pod IP inside the cluster, through the API server's pod proxy outside.

One small protocol with three implementations; `SilentChannel` is for clusters whose pods run nothing
(simulated nodes), where every job lives by its pods' status alone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import aiohttp

from zerotrain.contract.launch import WORKER_HTTP_PORT
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
MAX_CALLS = 50
"""Calls to workers at once: thousands of jobs share one event loop."""


class ChannelKind(StrEnum):
    DIRECT = "direct"
    PROXY = "proxy"
    SILENT = "silent"


class ChannelError(Exception):
    """The worker did not answer as asked. `final`: asking again cannot help (wrong token, no such path)."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One worker pod as a callee."""

    namespace: str
    pod: str
    ip: str | None


class WorkerChannel(Protocol):
    """What the operator may ask a worker."""

    async def report(self, worker: Worker) -> WorkerReport:
        """The worker's progress. Raises ChannelError."""

    async def request_yield(self, worker: Worker, *, attempt: int, token: str) -> None:
        """Checkpoint and stop all ranks. Returns once accepted. Raises ChannelError."""

    async def stacks(self, worker: Worker, *, token: str) -> str:
        """The stacks of the worker's ranks. Raises ChannelError."""


class HttpChannel:
    """Both real channels: they differ in the URL and in who is asked to let us through."""

    def __init__(self, api: Api, session: aiohttp.ClientSession, kind: ChannelKind) -> None:
        self._api, self._session, self._kind = api, session, kind
        self._slots = asyncio.Semaphore(MAX_CALLS)

    async def report(self, worker: Worker) -> WorkerReport:
        text = await self._call("GET", worker, PROGRESS_PATH, {}, None)
        try:
            return WorkerReport.from_json(text)
        except ValueError as error:
            raise ChannelError(f"{worker.pod}: {error}") from error

    async def request_yield(self, worker: Worker, *, attempt: int, token: str) -> None:
        await self._call("POST", worker, YIELD_PATH, bearer(token), yield_body(attempt))

    async def stacks(self, worker: Worker, *, token: str) -> str:
        return await self._call("GET", worker, STACKS_PATH, bearer(token), None)

    async def _call(
        self, method: str, worker: Worker, path: str, headers: dict[str, str], body: bytes | None
    ) -> str:
        url, session, own = await self._route(worker, path)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with (
                self._slots,
                session.request(
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
            raise ChannelError(f"{worker.pod}: {method} {path}: {error!r}") from error

    async def _route(self, worker: Worker, path: str) -> tuple[str, aiohttp.ClientSession, dict[str, str]]:
        if self._kind is ChannelKind.DIRECT:
            if worker.ip is None:
                raise ChannelError(f"{worker.pod} has no IP yet")
            host = f"[{worker.ip}]" if ":" in worker.ip else worker.ip
            return f"http://{host}:{WORKER_HTTP_PORT}{path}", self._session, {}
        server = self._api.connection.server
        proxy = f"/api/v1/namespaces/{worker.namespace}/pods/{worker.pod}:{WORKER_HTTP_PORT}/proxy{path}"
        # The API server takes its own Authorization out before it passes the request on.
        return server + proxy, self._api.session, await self._api.connection.headers()


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
