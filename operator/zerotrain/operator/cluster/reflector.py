"""Keeps the pod store equal to the cluster. Only pods that carry our label are asked for."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence

from zerotrain.operator.cluster.api import Api, Json
from zerotrain.operator.cluster.listwatch import ListWatch
from zerotrain.operator.cluster.scope import scoped
from zerotrain.operator.cluster.store import JobKey, PodStore
from zerotrain.operator.constants import LABEL_JOB

PATH = "/api/v1/pods"


class PodReflector:
    """`run()` until cancelled; `changed` is called with the key of every job whose pods changed, `seen` with
    the namespace of a list before which its pods were unknown. One watch for the whole cluster, or one for
    each of `namespaces`.

    A namespace that is refused, or gone with its roles, keeps none of the others waiting.
    """

    def __init__(
        self,
        api: Api,
        store: PodStore,
        changed: Callable[[JobKey], None],
        namespaces: Sequence[str] = (),
        seen: Callable[[str | None], None] = lambda namespace: None,
    ) -> None:
        self.synced = asyncio.Event()
        """Set when every namespace has been listed or was refused, and at least one was listed."""
        self._store, self._api, self._seen = store, api, seen
        self._missing: set[str | None] = set(namespaces or (None,))
        paths = zip(namespaces or (None,), scoped(PATH, namespaces), strict=True)
        self._watches = {
            namespace: ListWatch(
                api,
                path=path,
                kind="pods",
                sink=_Pods(api, store, changed, namespace, self._listed),
                label_selector=LABEL_JOB,
                lost_sight=functools.partial(self._lost_sight, namespace),
            )
            for namespace, path in paths
        }

    @property
    def age_s(self) -> float:
        """Since the last list, event or bookmark of the watch that is silent for longest; those that are
        refused say nothing about the others' health."""
        allowed = [watch.age_s for watch in self._watches.values() if not watch.refused]
        return max(allowed or [watch.age_s for watch in self._watches.values()])

    @property
    def refused(self) -> dict[str, bool]:
        """By namespace (empty: all of them), whether its pods may not be read: then no job there is looked
        after."""
        return {name or "": watch.refused for name, watch in self._watches.items()}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for watch in self._watches.values():
                group.create_task(watch.run())

    def _listed(self, namespace: str | None) -> None:
        is_news = self._store.sight.gained(namespace, now=self._api.time.now())
        self._settle(namespace)
        if is_news:
            self._seen(namespace)

    def _lost_sight(self, namespace: str | None) -> None:
        self._store.sight.lost(namespace)
        self._settle(namespace)

    def _settle(self, namespace: str | None) -> None:
        """One answer less to wait for. An operator that may read nothing at all is not ready."""
        self._missing.discard(namespace)
        if not self._missing and not all(watch.refused for watch in self._watches.values()):
            self.synced.set()


class _Pods:
    """The sink: pods go into the store by the operator's clock."""

    def __init__(
        self,
        api: Api,
        store: PodStore,
        changed: Callable[[JobKey], None],
        namespace: str | None,
        listed: Callable[[str | None], None],
    ) -> None:
        self._api, self._store, self._changed = api, store, changed
        self._namespace, self._told = namespace, listed

    def put(self, item: Json) -> str:
        self._tell(self._store.put(item, now=self._api.time.now()))
        return str(item["metadata"]["uid"])

    def remove(self, item: Json) -> None:
        self._tell(self._store.remove(item, now=self._api.time.now()))

    def listed(self, keys: set[str], version: int) -> None:
        for key in self._store.retain(keys, version=version, namespace=self._namespace):
            self._tell(key)
        self._told(self._namespace)

    def _tell(self, key: JobKey | None) -> None:
        if key is not None:
            self._changed(key)
