"""An unreliable connection to the API server: faults between an operator and a control plane.

The proxy is plain HTTP on loopback in front of the API server's TLS. The caller's own token passes through,
so its rights are the shipped ones. `fault_rates` gives the probability of each fault and may be changed at
any moment.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
from aiohttp import web

from tests.cluster.chaos.loop_thread import LoopThread
from tests.support.devcluster import Cluster

HOP_BY_HOP = frozenset({"host", "content-length", "transfer-encoding", "connection", "accept-encoding"})
REFUSALS = ((429, "TooManyRequests"), (500, "InternalError"), (503, "ServiceUnavailable"), (504, "Timeout"))
ERRORS = ((500, "InternalError"), (504, "Timeout"))
"""Errors of a watch that the API server had accepted."""
MAX_STALE_S = 3.0
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultRates:
    """Probability of each fault, from 0 to 1, per request or watch."""

    refused: float = 0.0
    """429, 500, 503 or 504 instead of an action."""
    vanished: float = 0.0
    """The connection breaks before the API server gets the request."""
    unanswered: float = 0.0
    """The request is executed, and the connection breaks before the answer."""
    slow: float = 0.0
    """The request is delayed by up to `slow_s`."""
    slow_s: float = 0.3
    conflict: float = 0.0
    """Another client writes to the job just before its status is written."""
    stale: float = 0.0
    """The answer is an object as it was up to three seconds ago."""
    dropped: float = 0.0
    """The watch ends within `watch_s`, on average after half of it."""
    watch_s: float = 4.0
    expired: float = 0.0
    """The watch is rejected with 410: the version is too old."""
    failing: float = 0.0
    """The watch delivers an error of the API server, such as of an etcd without a leader."""
    lagging: float = 0.0
    """Every event of the watch arrives up to `lag_s` late."""
    lag_s: float = 1.0


CALM = FaultRates()
ROUGH = FaultRates(
    refused=0.05,
    vanished=0.03,
    unanswered=0.05,
    slow=0.1,
    conflict=0.15,
    stale=0.1,
    dropped=0.5,
    expired=0.1,
    failing=0.1,
    lagging=0.3,
)


class FaultProxy:
    """A proxy that listens from construction until `stop()`; several operators may use one."""

    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        self._server, self._admin = cluster.api_url, {"Authorization": f"Bearer {cluster.token}"}
        self._ca = cluster.ca
        self._chance = chance
        self._earlier: dict[str, list[tuple[float, bytes]]] = {}
        self.fault_rates = CALM
        self.faults: Counter[str] = Counter()
        """Number of requests by fault."""
        self.answers: Counter[int] = Counter()
        """Number of the API server's answers by status code."""
        self.forbidden: list[str] = []
        """Requests that the caller's role does not allow, with the answer."""
        self._thread = LoopThread("fault proxy")
        self._thread.call(self._start())

    def stop(self) -> None:
        self._thread.call(self._close())
        self._thread.stop()

    async def _start(self) -> None:
        tls = ssl.create_default_context(cadata=self._ca.decode())
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, limit=0), auto_decompress=False, trust_env=False
        )
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    def _strikes(self, fault: str) -> bool:
        likely = float(getattr(self.fault_rates, fault))
        if likely == 0.0 or self._chance.random() >= likely:
            return False
        self.faults[fault] += 1
        return True

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if self._strikes("slow"):
            await asyncio.sleep(self._chance.uniform(0, self.fault_rates.slow_s))
        if self._strikes("vanished"):
            return _broken(request)
        if self._strikes("refused"):
            return _refusal(*self._chance.choice(REFUSALS))
        try:
            if request.query.get("watch") == "true":
                return await self._watch(request)
            return await self._pass_on(request, body)
        except (aiohttp.ClientError, OSError):
            return _broken(request)  # the API server is down, or the caller is gone

    async def _pass_on(self, request: web.Request, body: bytes) -> web.StreamResponse:
        if request.method == "PUT" and request.path.endswith("/status") and self._strikes("conflict"):
            await self._write_concurrently(request.path.removesuffix("/status"))
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        # Lists are recognised by their content, and from 128 KiB on an API server would compress them.
        headers["Accept-Encoding"] = "identity"
        url = self._server + request.path_qs
        async with self._session.request(request.method, url, data=body or None, headers=headers) as answer:
            content = await answer.read()
        self.answers[answer.status] += 1
        if answer.status == 403:
            self.forbidden.append(
                f"{request.method} {request.path}: {content[:300].decode(errors='replace')}"
            )
        if request.method != "GET" and self._strikes("unanswered"):
            return _broken(request)
        if request.method == "GET" and answer.status == 200:
            content = self._remembered(request, content)
        kept = ("Content-Type", "Retry-After", "Date")
        passed = {name: answer.headers[name] for name in kept if name in answer.headers}
        return web.Response(status=answer.status, body=content, headers=passed)

    def _remembered(self, request: web.Request, content: bytes) -> bytes:
        """Return the answer, or an earlier one to the same request where an API server may give it.

        Lists are read by quorum unless they ask for less, and so are leases (see ADR 0024).
        """
        listed = b'"items":' in content and request.query.get("resourceVersion") != "0"
        if "/leases/" in request.path or listed:
            return content
        now, key = time.monotonic(), request.path_qs
        earlier = [item for item in self._earlier.get(key, ()) if now - item[0] < MAX_STALE_S]
        self._earlier[key] = [*earlier, (now, content)][-8:]
        if earlier and self._strikes("stale"):
            return self._chance.choice(earlier)[1]
        return content

    async def _write_concurrently(self, path: str) -> None:
        """Write to the object as another client, as `kubectl annotate` does."""
        note = {"metadata": {"annotations": {"chaos/touched": str(self._chance.randrange(1 << 30))}}}
        headers = {**self._admin, "Content-Type": "application/merge-patch+json"}
        async with self._session.patch(self._server + path, data=json.dumps(note), headers=headers) as answer:
            await answer.read()

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        if self._strikes("expired"):
            return await _ended(request, 410, "Expired")
        if self._strikes("failing"):
            return await _ended(request, *self._chance.choice(ERRORS))
        dies_at = None
        if self._strikes("dropped"):
            dies_at = time.monotonic() + self._chance.uniform(0, self.fault_rates.watch_s)
        lag_s = self._chance.uniform(0, self.fault_rates.lag_s) if self._strikes("lagging") else 0.0
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        timeout = aiohttp.ClientTimeout(total=None)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        async with self._session.get(
            self._server + request.path_qs, headers=headers, timeout=timeout
        ) as answer:
            response.set_status(answer.status)
            await response.prepare(request)
            while True:
                left = None if dies_at is None else dies_at - time.monotonic()
                try:
                    chunk = await asyncio.wait_for(answer.content.readany(), left)
                except TimeoutError:
                    return _broken(request)
                if not chunk:
                    break
                await asyncio.sleep(lag_s)
                await response.write(chunk)
        return response

    def settle(self, **changes: float) -> None:
        """Change some of the rates."""
        self.fault_rates = replace(self.fault_rates, **changes)


def _broken(request: web.Request) -> web.Response:
    """Reset the caller's connection."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)


def _refusal(code: int, reason: str) -> web.Response:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
    headers = {"Retry-After": "1"} if code == 429 else {}
    return web.json_response({**status, "message": "injected"}, status=code, headers=headers)


async def _ended(request: web.Request, code: int, reason: str) -> web.StreamResponse:
    """Answer as the API server does for an error in a watch: 200, then one event that ends it."""
    status = {"kind": "Status", "code": code, "reason": reason, "message": "injected"}
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
    return response
