"""Keeps the pod store equal to the cluster. Only pods that carry our label are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from zerotrain.operator.cluster.api import Api, Json
from zerotrain.operator.cluster.listwatch import ListWatch
from zerotrain.operator.cluster.store import JobKey, PodStore
from zerotrain.operator.constants import LABEL_JOB

PATH = "/api/v1/pods"


class PodReflector(ListWatch):
    """`run()` until cancelled; `changed` is called with the key of every job whose pods changed."""

    def __init__(self, api: Api, store: PodStore, changed: Callable[[JobKey], None]) -> None:
        self.synced = asyncio.Event()
        sink = _Pods(api, store, changed, self.synced)
        super().__init__(api, path=PATH, kind="pods", sink=sink, label_selector=LABEL_JOB)


class _Pods:
    """The sink: pods go into the store by the operator's clock."""

    def __init__(
        self, api: Api, store: PodStore, changed: Callable[[JobKey], None], synced: asyncio.Event
    ) -> None:
        self._api, self._store, self._changed, self._synced = api, store, changed, synced

    def put(self, item: Json) -> str:
        self._tell(self._store.put(item, now=self._api.time.now()))
        return str(item["metadata"]["uid"])

    def remove(self, item: Json) -> None:
        self._tell(self._store.remove(item, now=self._api.time.now()))

    def listed(self, keys: set[str], version: int) -> None:
        for key in self._store.retain(keys, version=version, now=self._api.time.now()):
            self._tell(key)
        self._synced.set()

    def _tell(self, key: JobKey | None) -> None:
        if key is not None:
            self._changed(key)
