"""API server that answers as a test scripts it: real HTTP, real aiohttp, no Kubernetes behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client

from zerotrain.operator.cluster.api import Api, ApiLimits
from zerotrain.operator.cluster.connection import Connection
from zerotrain.operator.cluster.telemetry import Telemetry

Json = dict[str, Any]
Answer = tuple[int, Json]
FAST = ApiLimits(retries=3, first_backoff_s=0.001, max_backoff_s=0.002, timeout_s=60)


def failure(code: int, reason: str, message: str = "") -> Answer:
    """Return a Status object, which is the API server's form of an error."""
    return code, {"kind": "Status", "code": code, "reason": reason, "message": message}


async def created(request: web.Request) -> web.Response:
    """Answer as if the object was stored as it was sent."""
    meta = (await request.json())["metadata"]
    return web.json_response({"metadata": {"uid": meta["name"], **meta}}, status=201)


class ApiDouble:
    """Scripted server: `VERB /path` -> answers; the last answer of a list is repeated. Unknown requests get
    404.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Json]] = []
        """Verb, path and body of every request."""
        self.headers: dict[str, str] = {}
        """Headers of every answer."""
        self._answers: dict[str, list[Answer | Callable[[web.Request], Any]]] = {}

    def on(self, request: str, *answers: Answer | Callable[[web.Request], Any]) -> None:
        self._answers[request] = list(answers)

    def asked(self, request: str) -> int:
        return sum(1 for verb, path, _ in self.requests if f"{verb} {path}" == request)

    def bodies(self, request: str) -> list[Json]:
        return [body for verb, path, body in self.requests if f"{verb} {path}" == request]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        self.requests.append((request.method, request.path, json.loads(text) if text else {}))
        answers = self._answers.get(f"{request.method} {request.path}", [failure(404, "NotFound")])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if callable(answer):
            response: web.StreamResponse = await answer(request)
            return response
        return web.json_response(answer[1], status=answer[0], headers=self.headers)


@asynccontextmanager
async def served(double: ApiDouble, limits: ApiLimits = FAST) -> AsyncIterator[Api]:
    """Yield the operator's client, connected to the double."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", double.handle)
    async with TestServer(app) as server:
        configuration = client.Configuration(host=str(server.make_url("")).rstrip("/"))
        connection = Connection(configuration=configuration, in_cluster=False)
        async with Api(connection, limits, Telemetry()) as api:
            yield api


def pod_json(index: int, *, version: int, uid: str = "job-uid", **status: Any) -> Json:
    """Return a worker pod of job `gpt` in namespace `ml`."""
    labels = {
        "zerotrain.dev/job": "gpt",
        "zerotrain.dev/job-uid": uid,
        "zerotrain.dev/attempt": "1",
        "zerotrain.dev/rank": str(index),
    }
    meta = {
        "name": f"gpt-1-{index}",
        "namespace": "ml",
        "uid": f"pod-{index}",
        "resourceVersion": str(version),
        "labels": labels,
        "ownerReferences": [{"kind": "ZeroTrainingJob", "name": "gpt", "uid": uid, "controller": True}],
    }
    return {"kind": "Pod", "metadata": meta, "spec": {}, "status": {"phase": "Pending", **status}}
