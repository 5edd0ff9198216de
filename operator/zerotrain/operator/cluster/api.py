"""Requests to the API server as plain JSON: rate-limited, retried and counted. All of `cluster` uses this
module."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp

from zerotrain.operator.cluster import json_codec
from zerotrain.operator.cluster.connection import Connection, ServerTime
from zerotrain.operator.cluster.errors import NotLeading, Unavailable, error_of
from zerotrain.operator.cluster.limits import TokenBucket
from zerotrain.operator.cluster.telemetry import Telemetry

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 32 << 20
"""Maximum length of one line of a watch, in bytes. An object that etcd accepts (1.5 MiB) may be six times as
long with all its characters escaped."""

LARGE_EVENT_BYTES = 64 << 10
"""Bytes of an event of a watch from which on it is read beside the event loop. Searching a megabyte of a
tenant's JSON takes a tenth of a second, and its author may touch the object all the time."""

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"

Json = dict[str, Any]


class Answer(StrEnum):
    """Part of an object that the API server returns, as a value of the Accept header."""

    WHOLE = JSON
    METADATA = f"{JSON};as=PartialObjectMetadata;g=meta.k8s.io;v=v1,{JSON}"
    """Metadata alone, for writes: the rest is what was sent, and costs the API server and the operator as
    much as the write of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiLimits:
    """Limits on the load that the operator puts on the API server."""

    requests_per_second: float = 1000.0
    burst: int = 2000
    timeout_s: float = 40.0
    """Timeout of one try. The API server ends a write after 34 s, of which one webhook may take 30: its
    answer names the webhook. Watches have their own."""
    patience_s: float = 20.0
    """Time after which a request is not repeated any more, unless the server requested the delay: a webhook
    that hangs must be reported before it has hung for all retries."""
    retries: int = 6
    first_backoff_s: float = 0.25
    max_backoff_s: float = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request to the API server."""

    method: str
    path: str
    kind: str
    """Resource that the request is about (`pods`, `leases`, ...), as a label of metrics: paths would be too
    many labels."""
    body: Json | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    content_type: str = JSON
    answer: Answer = Answer.WHOLE
    retries: int | None = None
    """Number of retries, fewer than the limits' where waiting is worse than failing."""
    urgent: bool = False
    """Whether the request passes all that wait for the client's own rate limit, and uses a connection that is
    kept for it: the renewal of the lease does not wait for requests that hang."""


class Api:
    """The operator's only client of the API server. `async with` opens and closes its session."""

    def __init__(self, connection: Connection, limits: ApiLimits, telemetry: Telemetry) -> None:
        self.connection = connection
        self.limits = limits
        self.telemetry = telemetry
        self.time = ServerTime()
        self.may_write: Callable[[], bool] | None = None
        """Predicate called right before every write except that of the lease: a replica that was stopped in
        the middle of a pass must not finish it after another replica took over."""
        self._bucket = TokenBucket(rate=limits.requests_per_second, burst=limits.burst)
        self._session: aiohttp.ClientSession | None = None
        self._urgent: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Api:
        self._session, self._urgent = self.connection.session(), self.connection.session(limit=2)
        return self

    async def __aexit__(self, *error: object) -> None:
        for session in (self._session, self._urgent):
            if session is not None:
                await session.close()
        self._session = self._urgent = None

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the API client is not open; use it as `async with Api(...) as api`")
        return self._session

    def _session_of(self, request: Request) -> aiohttp.ClientSession:
        return self._urgent if request.urgent and self._urgent is not None else self.session

    async def call(self, request: Request) -> Json:
        """Return the answer's JSON. Raises ApiError; 429, 5xx and lost connections only after all retries."""
        text = await self.call_raw(request)
        return dict(json_codec.read(text)) if text else {}

    async def call_raw(self, request: Request) -> bytes:
        retries = self.limits.retries if request.retries is None else request.retries
        until = time.monotonic() + self.limits.patience_s
        for attempt in range(retries + 1):
            try:
                return await self._try(request)
            except Unavailable as error:
                is_late = time.monotonic() >= until and not error.retry_after_s
                if attempt == retries or is_late:
                    raise
                await asyncio.sleep(self.backoff_s(attempt, error))
        raise AssertionError("unreachable: the loop returns or raises")

    async def watch(
        self,
        path: str,
        params: Mapping[str, str],
        *,
        kind: str,
        read: Callable[[bytes], Json] = json_codec.read,
    ) -> AsyncIterator[Json]:
        """Iterate over the events of one watch until the server ends it. Raises ApiError,
        aiohttp.ClientError. An event for which `read` raises ValueError is skipped."""
        await self._bucket.take()
        headers = await self.connection.headers()
        url = self.connection.server + path
        # Bookmarks arrive every minute: a watch that is silent for longer is dead, whatever TCP says.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=90)
        query = {**params, "watch": "true", "allowWatchBookmarks": "true"}
        async with self.session.get(url, params=query, headers=headers, timeout=timeout) as response:
            self.telemetry.request("WATCH", kind, response.status)
            if response.status >= 300:
                raise error_of(f"WATCH {path}", response.status, await response.read())
            async for line in lines_of(response.content.iter_any()):
                try:
                    is_large = len(line) >= LARGE_EVENT_BYTES
                    event = await asyncio.to_thread(read, line) if is_large else read(line)
                except ValueError as error:
                    log.warning("skipping an event of %s: %s: %.200r", kind, error, line)
                    continue
                yield event

    async def stream(self, request: Request) -> AsyncIterator[bytes]:
        """Iterate over the chunks of an answer as they arrive. Raises as `call` does; an answer that breaks
        off is not requested again."""
        retries, has_begun = self.limits.retries, False
        # A compressed chunk may expand to a thousand times its size.
        headers = {"Accept-Encoding": "identity"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=self.limits.timeout_s)
        for attempt in range(retries + 1):
            try:
                async with self._answer(request, timeout, headers) as response:
                    async for piece in response.content.iter_any():
                        has_begun = True
                        yield piece
                return
            except Unavailable as error:
                if has_begun or attempt == retries:
                    raise
                await asyncio.sleep(self.backoff_s(attempt, error))

    async def _try(self, request: Request) -> bytes:
        timeout = aiohttp.ClientTimeout(total=self.limits.timeout_s)
        async with self._answer(request, timeout, {}) as response:
            return await response.read()

    @asynccontextmanager
    async def _answer(
        self, request: Request, timeout: aiohttp.ClientTimeout, more_headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send the request once and yield an answer that is no error, with its body still unread."""
        await self._bucket.take(urgent=request.urgent)
        headers = {**await self.connection.headers(), "Accept": request.answer.value, **more_headers}
        data = None
        if request.body is not None:
            data = json_codec.write(request.body)
            headers["Content-Type"] = request.content_type
        description = f"{request.method} {request.path}"
        self._check_fence(request, description)
        started = time.monotonic()
        try:
            async with self._session_of(request).request(
                request.method,
                self.connection.server + request.path,
                params=request.params,
                data=data,
                headers=headers,
                timeout=timeout,
            ) as response:
                if response.status < 300:
                    yield response
                    self._count(request, response, started)
                    return
                body = await response.read()
                self._count(request, response, started)
                error = error_of(description, response.status, body)
                if isinstance(error, Unavailable):
                    error.retry_after_s = _retry_after(response)
                raise error
        except (aiohttp.ClientError, TimeoutError, OSError) as cause:
            self.telemetry.request(request.method, request.kind, 0, time.monotonic() - started)
            raise Unavailable(f"{description}: no answer: {cause!r}") from cause

    def _count(self, request: Request, response: aiohttp.ClientResponse, started: float) -> None:
        took_s = time.monotonic() - started
        self.telemetry.request(request.method, request.kind, response.status, took_s)
        self.time.record_date(response.headers.get("Date"))

    def _check_fence(self, request: Request, description: str) -> None:
        writes = request.method != "GET" and request.kind != "leases"
        if writes and self.may_write is not None and not self.may_write():
            raise NotLeading(f"{description}: not sent, because another replica may lead by now")

    def backoff_s(self, attempt: int, error: Unavailable) -> float:
        """Return the seconds before the next try; never less than the server requested."""
        asked = error.retry_after_s or 0.0
        own = min(self.limits.first_backoff_s * 2.0**attempt, self.limits.max_backoff_s)
        # Jitter, so that a thousand creations that were rejected together do not come back together. The
        # server's delay is only made longer: a request that comes sooner wastes a try.
        return max(asked * random.uniform(1.0, 1.2), own * random.uniform(0.8, 1.2))


async def lines_of(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Iterate over the lines of a watch. The lines are split here since an object may exceed the line limit
    of aiohttp's reader. A line that is longer than any object can be is skipped."""
    parts, size = list[bytes](), 0
    async for piece in pieces:
        *lines, rest = piece.split(b"\n")
        for line in lines:
            whole = b"".join([*parts, line]) if size <= MAX_LINE_BYTES else b""
            parts, size = [], 0
            if whole.strip():
                yield whole
        size += len(rest)
        parts = [*parts, rest] if size <= MAX_LINE_BYTES else []


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    try:
        return float(response.headers.get("Retry-After", ""))
    except ValueError:
        return None
