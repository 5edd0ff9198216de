"""Keeps the pod store equal to the cluster: one list in pages, then one watch, for the operator's life.

Only pods that carry our label are asked for. A version that is too old (410) means a new list, everything
else a new watch from where the last one ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable

import aiohttp

from zerotrain.operator.cluster.api import Api, Json, Request
from zerotrain.operator.cluster.errors import ApiError, Gone, error_of
from zerotrain.operator.cluster.store import JobKey, PodStore, version_of
from zerotrain.operator.constants import LABEL_JOB

log = logging.getLogger(__name__)

PATH = "/api/v1/pods"
PAGE = 500
WATCH_SECONDS = 300
MAX_PAUSE_S = 10.0


class PodReflector:
    """`run()` until cancelled; `changed` is called with the key of every job whose pods changed."""

    def __init__(self, api: Api, store: PodStore, changed: Callable[[JobKey], None]) -> None:
        self._api, self._store, self._changed = api, store, changed
        self.synced = asyncio.Event()
        self._version: str | None = None
        self._alive_at = time.monotonic()

    @property
    def age_s(self) -> float:
        """Since the last list, event or bookmark."""
        return time.monotonic() - self._alive_at

    async def run(self) -> None:
        failures = 0
        while True:
            started = time.monotonic()
            try:
                if self._version is None:
                    await self._list()
                await self._watch()
            except Gone as error:
                log.info("pod watch: %s; listing again", error)
                self._version = None
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                log.warning("pod watch: %r; trying again", error)
            lasted = time.monotonic() - started
            failures = 0 if lasted > MAX_PAUSE_S else failures + 1
            pause = min(0.1 * 2.0 ** min(failures, 10), MAX_PAUSE_S)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _list(self) -> None:
        """Page by page into the store: the JSON of 20,000 pods would be the operator's largest object."""
        listed: set[str] = set()
        changed: set[JobKey | None] = set()
        params = {"labelSelector": LABEL_JOB, "limit": str(PAGE)}
        while True:
            answer = await self._api.call(Request(method="GET", path=PATH, kind="pods", params=params))
            for pod in answer.get("items", ()):
                listed.add(pod["metadata"]["uid"])
                changed.add(self._store.put(pod, now=self._api.time.now()))
            more = answer["metadata"].get("continue")
            if not more:
                break
            params = {**params, "continue": more}
        self._alive_at = time.monotonic()
        changed |= self._store.retain(listed, version=version_of(answer), now=self._api.time.now())
        for key in changed:
            if key is not None:
                self._changed(key)
        self._version = answer["metadata"]["resourceVersion"]
        self.synced.set()

    async def _watch(self) -> None:
        params = {
            "labelSelector": LABEL_JOB,
            "resourceVersion": self._version or "",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        async for event in self._api.watch(PATH, params, kind="pods"):
            self._alive_at = time.monotonic()
            self._take(event)

    def _take(self, event: Json) -> None:
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            raise error_of("WATCH pods", int(item.get("code", 500)), json.dumps(item).encode())
        now = self._api.time.now()
        key = None
        if kind == "DELETED":
            key = self._store.remove(item, now=now)
        elif kind in ("ADDED", "MODIFIED"):
            key = self._store.put(item, now=now)
        self._version = item["metadata"]["resourceVersion"]
        if key is not None:
            self._changed(key)
