"""A recorder of every version of every job, pod and Workload of a namespace, in etcd's order.

It has its own watches, straight to the API server. A gap in the record is an error, as checks of half a
history prove nothing. Revisions of all kinds come from one counter, so that they make one history.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.cluster.chaos.loop_thread import LoopThread
from tests.support.devcluster import PATIENCE_S, Cluster

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One version of one object."""

    revision: int
    kind: str
    """`Pod`, `Job` or `Workload`."""
    change: str
    """`ADDED`, `MODIFIED` or `DELETED`."""
    body: Json

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])


class WatchRecorder:
    """A recorder that watches from construction until `stop()`."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._seen: list[Seen] = []
        self.broken: list[BaseException] = []
        self._paths = {
            "Job": f"/apis/zerotrain.dev/v1alpha1/namespaces/{namespace}/zerotrainingjobs",
            "Pod": f"/api/v1/namespaces/{namespace}/pods",
            "Workload": f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{namespace}/workloads",
        }
        self._versions: dict[str, int] = {}
        self._marks = 0
        self._thread = LoopThread("watch recorder")
        self._thread.call(self._start())

    def history(self) -> list[Seen]:
        """Return the history so far, oldest version first."""
        return sorted(self._seen, key=lambda item: item.revision)

    def present(self) -> list[Json]:
        """Return the objects that exist now, as far as the watches have reported."""
        alive: dict[str, Json] = {}
        for item in self.history():
            alive[item.uid] = item.body
            if item.change == "DELETED":
                del alive[item.uid]
        return list(alive.values())

    def catch_up(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until everything is recorded that happened before this call."""
        self._thread.call(self._catch_up(timeout_s), timeout_s=timeout_s + 5)
        if self.broken:
            raise RuntimeError(f"the watch recorder has not seen everything: {self.broken[0]!r}")

    def stop(self) -> None:
        for task in self._tasks:
            self._thread.loop.call_soon_threadsafe(task.cancel)
        self._thread.call(self._session.close())
        self._thread.stop()

    async def _start(self) -> None:
        tls = ssl.create_default_context(cadata=self._cluster.ca.decode())
        headers = {"Authorization": f"Bearer {self._cluster.token}"}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls), headers=headers, trust_env=False
        )
        self._versions_changed, self._tasks = asyncio.Condition(), []
        for kind, path in self._paths.items():
            listed = await self._first(path)
            self._take(kind, (("ADDED", item) for item in listed["items"]))
            self._versions[kind] = int(listed["metadata"]["resourceVersion"])
            self._tasks.append(asyncio.create_task(self._watch(kind, path)))

    async def _first(self, path: str) -> Json:
        while True:
            try:
                return await self._send("GET", path)
            except RuntimeError as error:
                # A kind that has just been defined answers 429 until its storage is ready.
                if ": 429 " not in str(error):
                    raise
                await asyncio.sleep(0.5)

    async def _watch(self, kind: str, path: str) -> None:
        try:
            while True:
                try:
                    await self._follow(kind, path)
                except (aiohttp.ClientError, TimeoutError, OSError):
                    await asyncio.sleep(0.1)  # the API server may be one of the victims
        except Exception as error:
            self.broken.append(error)

    async def _follow(self, kind: str, path: str) -> None:
        params = {
            "watch": "true",
            "resourceVersion": str(self._versions[kind]),
            "allowWatchBookmarks": "true",
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
        async with self._session.get(self._cluster.api_url + path, params=params, timeout=timeout) as answer:
            if answer.status != 200:
                raise RuntimeError(f"watch of {path}: {answer.status} {await answer.text()}")
            buffer = b""
            async for chunk in answer.content.iter_any():
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in filter(None, lines):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise RuntimeError(f"watch of {path}: {event['object']}")
                    if event["type"] != "BOOKMARK":
                        self._take(kind, [(event["type"], event["object"])])
                    self._versions[kind] = int(event["object"]["metadata"]["resourceVersion"])
                async with self._versions_changed:
                    self._versions_changed.notify_all()

    def _take(self, kind: str, changes: Iterable[tuple[str, Json]]) -> None:
        for change, body in changes:
            body["metadata"].pop("managedFields", None)
            if kind == "Pod":
                body["spec"] = {"nodeName": body["spec"].get("nodeName")}
            revision = int(body["metadata"]["resourceVersion"])
            self._seen.append(Seen(revision=revision, kind=kind, change=change, body=body))

    async def _catch_up(self, timeout_s: float) -> None:
        """Write a mark into each of the two histories and wait until it is recorded."""
        async with asyncio.timeout(timeout_s):
            self._marks += 1
            meta = {"name": f"mark-{self._marks}"}
            containers = [{"name": "mark", "image": "mark"}]
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"containers": containers}}
            marked = {"Pod": await self._send("POST", self._paths["Pod"], pod)}
            for job in (await self._send("GET", self._paths["Job"]))["items"][:1]:
                path = f"{self._paths['Job']}/{job['metadata']['name']}"
                note = {"metadata": {"annotations": {"chaos/mark": str(self._marks)}}}
                marked["Job"] = await self._send("PATCH", path, note)
            for kind, item in marked.items():
                await self._until(kind, int(item["metadata"]["resourceVersion"]))
            await self._send("DELETE", f"{self._paths['Pod']}/{meta['name']}", {"gracePeriodSeconds": 0})

    async def _until(self, kind: str, revision: int) -> None:
        async with self._versions_changed:
            await self._versions_changed.wait_for(lambda: self._versions[kind] >= revision)

    async def _send(self, method: str, path: str, body: Json | None = None) -> Json:
        content = "application/merge-patch+json" if method == "PATCH" else "application/json"
        async with self._session.request(
            method, self._cluster.api_url + path, json=body, headers={"Content-Type": content}
        ) as answer:
            answered = await answer.read()
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status} {answered[:300]!r}")
            return dict(json.loads(answered))
