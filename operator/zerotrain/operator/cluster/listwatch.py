"""Lists in pages, and one list followed by one watch for the operator's life: the loop of a reflector without
its store.

A version that is too old (410) leads to a new list, and so does a rejection that ended; everything else leads
to a new watch from where the last one ended. The API server bounds a page by the number of items, never by
their size.

The scope of the operator is the whole cluster, or a few namespaces that its roles name one by one. Every list
and watch of namespaced objects takes its paths from `scoped`. Cluster-scoped objects (nodes, priority
classes, flavors of a queue) are requested in both modes, and their callers handle a rejection.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from zerotrain.contract.json_text import ItemSplitter
from zerotrain.operator.cluster import json_codec
from zerotrain.operator.cluster.api import Api, Json, Request
from zerotrain.operator.cluster.errors import ApiError, Forbidden, Gone, NotFound, error_of
from zerotrain.operator.cluster.store import version_of

log = logging.getLogger(__name__)

FIRST_PAGE = 100
MAX_PAGE = 500
"""Maximum of items on a page."""
PAGE_BYTES = 4 << 20
"""Approximate size of a page that is requested from the API server."""

WATCH_SECONDS = 300
MAX_PAUSE_S = 10.0
MAX_PASSED_OVER = 1000
"""Number of objects whose errors are remembered as logged; those of the oldest may be logged again."""


def scoped(path: str, namespaces: Sequence[str]) -> tuple[str, ...]:
    """Return the paths of a collection such as `/api/v1/pods`: itself for the whole cluster, else one per
    namespace."""
    if not namespaces:
        return (path,)
    prefix, _, plural = path.rpartition("/")
    return tuple(f"{prefix}/namespaces/{namespace}/{plural}" for namespace in namespaces)


class Listing:
    """Texts of all items of a list, to be iterated over once. Raises ApiError, ValueError.

    One item is held at a time. The API server holds a page: where items are large, fewer are requested.
    """

    def __init__(self, api: Api, *, path: str, kind: str, params: Mapping[str, str] | None = None) -> None:
        self._api, self._path, self._kind = api, path, kind
        self._params = dict(params or {})
        self.metadata: Json = {}
        """Metadata of the last page, once all items have been read."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        limit, place = FIRST_PAGE, dict[str, str]()
        while True:
            splitter, size = ItemSplitter(), 0
            params = {**self._params, "limit": str(limit), **place}
            request = Request(method="GET", path=self._path, kind=self._kind, params=params)
            async for piece in self._api.stream(request):
                size += len(piece)
                for item in splitter.feed(piece):
                    yield item
                await asyncio.sleep(0)  # reading chunks that have arrived never yields to the loop
            for item in splitter.finish():
                yield item
            self.metadata = dict(json_codec.read(splitter.envelope)).get("metadata") or {}
            more = self.metadata.get("continue")
            if not more:
                return
            place, limit = {"continue": more}, next_limit(limit, size)


def next_limit(limit: int, size: int) -> int:
    """Return the number of items to request next, where the last page had `limit` items and `size` bytes."""
    return max(min(limit * PAGE_BYTES // max(size, 1), limit * 4, MAX_PAGE), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """Functions that parse the texts of one kind. Both raise ValueError."""

    item: Callable[[bytes], Json] = json_codec.read
    event: Callable[[bytes], Json] = json_codec.read


class Sink(Protocol):
    """Destination of the objects. An exception from `put` or `remove` is logged and affects no other
    object."""

    def key(self, item: Json) -> str:
        """Return the key that identifies an object."""

    def put(self, item: Json) -> None:
        """Take an object that was listed, added or changed."""

    def remove(self, item: Json) -> None:
        """Take an object that was deleted."""

    def listed(self, keys: set[str], version: int) -> None:
        """Take the keys of all objects, as a full list of this version has arrived."""


class ListWatch:
    """List and watch until `run()` is cancelled. `lost_sight` is called when the API server begins to
    reject."""

    def __init__(
        self,
        api: Api,
        *,
        path: str,
        kind: str,
        sink: Sink,
        label_selector: str = "",
        lost_sight: Callable[[], None] = lambda: None,
        reader: Reader = Reader(),
    ) -> None:
        self._api, self._path, self._kind, self._sink = api, path, kind, sink
        self._reader, self._passed_over = reader, dict[str, None]()
        self._selection = {"labelSelector": label_selector} if label_selector else {}
        self._version: str | None = None
        self._lost_sight = lost_sight
        self.refused = False
        """Whether the API server forbids the watch, or knows no such path; until the next list."""
        self._alive_at = time.monotonic()

    @property
    def age_s(self) -> float:
        """Return the seconds since the last list, event or bookmark."""
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
                log.info("watch of %s: %s; listing again", self._kind, error)
                self._version = None
            except (Forbidden, NotFound) as error:
                self._be_refused(error)
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                log.warning("watch of %s: %r; trying again", self._kind, error)
            except Exception:
                # No stored object may end the loop.
                log.exception("watch of %s; listing again", self._kind)
                self._version = None
            failures = 0 if time.monotonic() - started > MAX_PAUSE_S else failures + 1
            pause = min(0.1 * 2.0 ** min(failures, 10), MAX_PAUSE_S)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    def _be_refused(self, error: ApiError) -> None:
        """Log the rejection once until access is granted: an operator for a few namespaces may have no
        further permissions, and a namespace takes its roles along when it is deleted."""
        level = logging.DEBUG if self.refused else logging.WARNING
        log.log(level, "%s cannot be watched and are not seen until access is granted: %s", self._kind, error)
        self._version = None  # changes in the meantime are seen only by a new list
        if not self.refused:
            self.refused = True
            self._lost_sight()

    async def _list(self) -> None:
        """Pass the listed items to the sink one by one: the JSON of 20,000 pods would be the operator's
        largest object."""
        keys = set[str]()
        listing = Listing(self._api, path=self._path, kind=self._kind, params=self._selection)
        async for text in listing:
            try:
                item = self._reader.item(text)
                keys.add(self._sink.key(item))
            except Exception as error:
                log.warning("skipping one of %s that cannot be read: %r: %.200r", self._kind, error, text)
                continue
            self._take(self._sink.put, item)
        self._alive_at = time.monotonic()
        if self.refused:
            log.info("%s can be watched again: %s", self._kind, self._path)
        self.refused = False
        self._version = str(listing.metadata["resourceVersion"])
        self._sink.listed(keys, version_of({"metadata": listing.metadata}))

    def _take(self, act: Callable[[Json], None], item: Json) -> None:
        """Call `act` on the object. An exception is logged once as long as it recurs, and affects no other
        object."""
        try:
            act(item)
        except Exception:
            meta = item.get("metadata") or {}
            key, name = str(meta.get("uid")), f"{meta.get('namespace', '')}/{meta.get('name', '')}"
            if key not in self._passed_over:
                log.exception("skipping %s %.300s", self._kind, name)
            self._passed_over[key] = None
            if len(self._passed_over) > MAX_PASSED_OVER:
                del self._passed_over[next(iter(self._passed_over))]

    async def _watch(self) -> None:
        params = {
            **self._selection,
            "resourceVersion": self._version or "",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        events = self._api.watch(self._path, params, kind=self._kind, read=self._reader.event)
        async for event in events:
            self._alive_at = time.monotonic()
            kind, item = event["type"], event["object"]
            if kind == "ERROR":
                raise error_of(f"WATCH {self._kind}", int(item.get("code", 500)), json.dumps(item).encode())
            if kind == "DELETED":
                self._take(self._sink.remove, item)
            elif kind in ("ADDED", "MODIFIED"):
                self._take(self._sink.put, item)
            self._version = item["metadata"]["resourceVersion"]


class ScopedWatch:
    """List and watch until `run()` is cancelled, with one ListWatch for the whole cluster or one for each of
    `namespaces`.

    `sink` and `lost_sight` are called with the namespace, None for the whole cluster; the sink calls `settle`
    when its list has arrived. A namespace that is forbidden, or was deleted with its roles, delays none of
    the others.
    """

    def __init__(
        self,
        api: Api,
        *,
        path: str,
        kind: str,
        sink: Callable[[str | None], Sink],
        namespaces: Sequence[str] = (),
        label_selector: str = "",
        lost_sight: Callable[[str | None], None] = lambda namespace: None,
        reader: Reader = Reader(),
    ) -> None:
        self.synced = asyncio.Event()
        """Event that is set when every namespace has been listed or was rejected, and at least one was
        listed."""
        self._missing: set[str | None] = set(namespaces or (None,))
        self._lost_sight = lost_sight
        paths = zip(namespaces or (None,), scoped(path, namespaces), strict=True)
        self._watches = {
            namespace: ListWatch(
                api,
                path=scope_path,
                kind=kind,
                sink=sink(namespace),
                label_selector=label_selector,
                lost_sight=functools.partial(self._lose_sight, namespace),
                reader=reader,
            )
            for namespace, scope_path in paths
        }

    @property
    def age_s(self) -> float:
        """Return the seconds since the last list, event or bookmark of the watch that is silent for longest.
        Rejected watches are left out as long as others are allowed: they say nothing about the others'
        health."""
        allowed = [watch.age_s for watch in self._watches.values() if not watch.refused]
        return max(allowed or [watch.age_s for watch in self._watches.values()])

    @property
    def refused(self) -> dict[str, bool]:
        """Whether reading is forbidden, by namespace (empty: all of them)."""
        return {name or "": watch.refused for name, watch in self._watches.items()}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for watch in self._watches.values():
                group.create_task(watch.run())

    def settle(self, namespace: str | None) -> None:
        """Count the namespace as answered. An operator that may read nothing at all is not ready."""
        self._missing.discard(namespace)
        if not self._missing and not all(self.refused.values()):
            self.synced.set()

    def _lose_sight(self, namespace: str | None) -> None:
        self._lost_sight(namespace)
        self.settle(namespace)
