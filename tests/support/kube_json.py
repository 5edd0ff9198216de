"""A few blocking requests to an API server as plain JSON, as test doubles need them."""

from __future__ import annotations

import json
import ssl
import time
from typing import TYPE_CHECKING, Any

import urllib3

if TYPE_CHECKING:
    from tests.support.devcluster import Cluster

Json = dict[str, Any]

PATIENCE_S = 60.0
"""Seconds to wait for the cache of a kind that was just installed, which answers 429 at first."""


class ApiDown(Exception):
    """The API server does not answer, as while a test has stopped it."""


class TooBusy(ApiDown):
    """The API server answers 429."""


class RequestRefused(RuntimeError):
    """The API server answers with another error of the 400s."""


class KubeJson:
    """Blocking client that keeps its connection: over a new one a request costs four times as much."""

    def __init__(self, cluster: Cluster) -> None:
        self._server, self._token = cluster.api_url, cluster.token
        tls = ssl.create_default_context(cadata=cluster.ca.decode())
        self._connections = urllib3.PoolManager(ssl_context=tls, retries=False, timeout=60)

    def get(self, path: str) -> Json:
        """Read an object; retry while the server answers 429, as clients of Kubernetes do."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._call("GET", path)
            except TooBusy:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def post(self, path: str, body: Json, *, exists_ok: bool = False, gone_ok: bool = False) -> Json:
        """Create an object; return an empty object where it exists (`exists_ok`), or where its parent is gone
        (`gone_ok`).
        """
        ignore = (*((409,) if exists_ok else ()), *((404, 409) if gone_ok else ()))
        return self._call("POST", path, body, ignore=ignore)

    def patch(self, path: str, body: Json) -> Json:
        """Apply a merge patch; an object that is gone or has been replaced is skipped."""
        return self._call("PATCH", path, body, ignore=(404, 409), content="application/merge-patch+json")

    def delete(self, path: str, uid: str, *, grace_s: int = 0) -> Json:
        """Delete at once, as a node does when the containers are gone; or with a grace period, as users
        do.
        """
        options = {"gracePeriodSeconds": grace_s, "preconditions": {"uid": uid}}
        return self._call("DELETE", path, options, ignore=(404, 409))

    def _call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        ignore: tuple[int, ...] = (),
        content: str = "application/json",
    ) -> Json:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": content}
        data = None if body is None else json.dumps(body).encode()
        try:
            answer = self._connections.request(method, self._server + path, body=data, headers=headers)
        except urllib3.exceptions.HTTPError as error:  # refused, or broken off in the middle
            raise ApiDown(f"{method} {path}: {error}") from error
        if answer.status < 300:
            return dict(answer.json())
        if answer.status in ignore:
            return {}
        text = answer.data.decode(errors="replace")
        if answer.status >= 500 or answer.status == 429:
            kind = TooBusy if answer.status == 429 else ApiDown
            raise kind(f"{method} {path}: {answer.status} {text[:200]}")
        raise RequestRefused(f"{method} {path}: {answer.status} {text[:1000]}")
