"""Endpoints /healthz, /readyz and /metrics of the operator. Healthy means that events arrive and the event
loop is not blocked."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

MAX_CONNECTIONS = 256
SEND_S = 5.0
"""Time in which a client must take its answer."""

SHARED_S = 1.0
"""Time for which all scrapes get the same text."""

LAG_INTERVAL_S = 1.0
MAX_LAG_S = 10.0
MAX_WATCH_AGE_S = 300.0
"""Seconds without an event or bookmark after which the operator is unhealthy. Bookmarks come every minute; a
shorter outage of the API server is no reason to restart."""


_MEANS = {
    "pods": "no job is reconciled",
    "zerotrainingjobs": "changes of jobs are not seen",
    "nodes": "lost, cordoned and tainted ones are not seen before their pods are",
}


class LoopLag:
    """Measure of how late the event loop wakes up; a blocking call anywhere shows here."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._beat = time.monotonic()

    @property
    def now_s(self) -> float:
        """Seconds of the last measured lag, or of the current one when the loop has just come back from a
        stall."""
        return max(self.seconds, time.monotonic() - self._beat - LAG_INTERVAL_S)

    async def run(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(LAG_INTERVAL_S)
            self.seconds = max(time.monotonic() - self._beat - LAG_INTERVAL_S, 0.0)


class _Server(web.Server):
    """Server with at most MAX_CONNECTIONS open connections: a new one closes the oldest. Clients that hold
    connections open must neither fill the operator's memory nor keep the kubelet's probes out."""

    def __call__(self) -> web.RequestHandler:
        held = [connection for connection in self.connections if connection.transport is not None]
        for connection in held[: max(len(held) - MAX_CONNECTIONS + 1, 0)]:
            _abort(connection.transport)
            connection.force_close()
        return super().__call__()


def _abort(transport: asyncio.Transport | None) -> None:
    """Close the connection; unlike `close`, without keeping an answer that the client never reads."""
    if transport is not None:
        transport.abort()


class _Scrapes:
    """Metrics as text. Thousands of jobs take a few tenths of a second and megabytes, so many clients that
    ask at once, and read slowly, share one text."""

    def __init__(self, registry: CollectorRegistry, before: Callable[[], None]) -> None:
        self._registry, self._before = registry, before
        self._lock = asyncio.Lock()
        self._made: tuple[float, str, bytes] = (-math.inf, "", b"")

    async def answer(self, request: web.BaseRequest) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        async with self._lock:
            made_at, made_type, body = self._made
            if made_type != content_type or time.monotonic() > made_at + SHARED_S:
                self._before()
                body = await asyncio.to_thread(encode, self._registry)  # the loop stays free
                self._made = time.monotonic(), content_type, body
        return web.Response(body=body, headers={"Content-Type": content_type})


def health_problems(*, lag_s: float, watch_age_s: float) -> list[str]:
    """Return the operator's problems as text; empty when it is healthy."""
    problems = []
    if lag_s > MAX_LAG_S:
        problems.append(f"the event loop is {lag_s:.1f} s late, {MAX_LAG_S:.0f} s are allowed")
    if watch_age_s > MAX_WATCH_AGE_S:
        problems.append(f"no event or bookmark for {watch_age_s:.0f} s, {MAX_WATCH_AGE_S:.0f} s are allowed")
    return problems


def unreadable_lines(refused: Mapping[tuple[str, str], bool]) -> list[str]:
    """Return one line for each resource and namespace (empty: the whole cluster) that may not be read, with
    the consequence."""
    lines = []
    for (resource, namespace), is_refused in refused.items():
        if is_refused:
            where = f"namespace {namespace}" if namespace else "the whole cluster"
            lines.append(f"{where}: {resource} may not be read, {_MEANS[resource]}")
    return lines


async def serve(
    address: str,
    *,
    problems: Callable[[], list[str]],
    synced: Callable[[], bool],
    registry: CollectorRegistry,
    before_scrape: Callable[[], None],
    unreadable: Callable[[], Sequence[str]] = tuple,
) -> Callable[[], Awaitable[None]]:
    """Listen on `host:port`; without a host, on all addresses of both IP families. Return a function that
    stops the server. /readyz shows the lines of `unreadable`, the resources that may not be read, which are
    no reason to restart. Raises OSError when the address is taken."""

    async def healthz(_: web.BaseRequest) -> web.Response:
        wrong = problems()
        return web.Response(text="\n".join(wrong) or "ok", status=503 if wrong else 200)

    async def readyz(_: web.BaseRequest) -> web.Response:
        ready = synced()
        lines = ["ok" if ready else "the first list of pods is not complete"]
        lines += unreadable()
        return web.Response(text="\n".join(lines), status=200 if ready else 503)

    pages = {"/healthz": healthz, "/readyz": readyz, "/metrics": _Scrapes(registry, before_scrape).answer}

    async def answer(request: web.BaseRequest) -> web.Response:
        page = pages.get(request.path) if request.method in ("GET", "HEAD") else None
        response = web.Response(status=404) if page is None else await page(request)
        try:
            async with asyncio.timeout(SEND_S):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            _abort(request.transport)
        return response

    runner = web.ServerRunner(_Server(answer, access_log=None), handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    host, _, port = address.rpartition(":")
    await web.TCPSite(runner, host.strip("[]") or None, int(port)).start()
    return runner.cleanup
