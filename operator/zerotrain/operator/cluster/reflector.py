"""Reflector that keeps the pod store equal to the cluster. Only pods with the operator's job label are
requested."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerotrain.operator.cluster.api import Api, Json
from zerotrain.operator.cluster.listwatch import ScopedWatch
from zerotrain.operator.cluster.store import JobKey, PodStore
from zerotrain.operator.constants import LABEL_JOB

PATH = "/api/v1/pods"


class PodReflector(ScopedWatch):
    """Watch on the pods until `run()` is cancelled. `changed` is called with the key of every job whose pods
    changed, `seen` with the namespace of a list before which its pods were unknown. Jobs are not reconciled
    where their pods are `refused`."""

    def __init__(
        self,
        api: Api,
        store: PodStore,
        changed: Callable[[JobKey], None],
        namespaces: Sequence[str] = (),
        seen: Callable[[str | None], None] = lambda namespace: None,
    ) -> None:
        self._store, self._api, self._seen = store, api, seen
        super().__init__(
            api,
            path=PATH,
            kind="pods",
            sink=lambda namespace: _Pods(api, store, changed, namespace, self._listed),
            namespaces=namespaces,
            label_selector=LABEL_JOB,
            lost_sight=store.sight.lost,
        )

    def _listed(self, namespace: str | None) -> None:
        is_news = self._store.sight.gained(namespace, now=self._api.time.now())
        self.settle(namespace)
        if is_news:
            self._seen(namespace)


class _Pods:
    """Sink of the watch: it puts pods into the store, with the operator's time."""

    def __init__(
        self,
        api: Api,
        store: PodStore,
        changed: Callable[[JobKey], None],
        namespace: str | None,
        listed: Callable[[str | None], None],
    ) -> None:
        self._api, self._store, self._changed = api, store, changed
        self._namespace, self._list_done = namespace, listed

    def key(self, item: Json) -> str:
        return str(item["metadata"]["uid"])

    def put(self, item: Json) -> None:
        self._notify(self._store.put(item, now=self._api.time.now()))

    def remove(self, item: Json) -> None:
        self._notify(self._store.remove(item, now=self._api.time.now()))

    def listed(self, keys: set[str], version: int) -> None:
        for key in self._store.retain(keys, version=version, namespace=self._namespace):
            self._notify(key)
        self._list_done(self._namespace)

    def _notify(self, key: JobKey | None) -> None:
        if key is not None:
            self._changed(key)
