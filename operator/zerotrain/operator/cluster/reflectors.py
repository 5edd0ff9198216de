"""Reflectors: they keep the operator's cache of jobs and its store of pods equal to the cluster. Of the pods,
only those with the operator's job label are requested.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

from zerotrain.operator.api.job_text import kept, read_event, read_job
from zerotrain.operator.cluster import json_codec
from zerotrain.operator.cluster.api import Api, Json
from zerotrain.operator.cluster.jobs import ALL_JOBS, JobCache, with_kind
from zerotrain.operator.cluster.listwatch import Reader, ScopedWatch
from zerotrain.operator.cluster.store import JobKey, PodStore, version_of
from zerotrain.operator.constants import LABEL_JOB, PLURAL

log = logging.getLogger(__name__)

BATCH_S = 0.1
"""Seconds that an event waits for further events of its job. Most events are the echo of a write of our own
whose answer is known by then, so that they cause no pass."""

BATCH_SIZE = 100
"""Number of jobs that are passed on at once: the jobs of a full list must not block the event loop."""


class JobReflector(ScopedWatch):
    """Watch on the jobs until `run()` is cancelled. `changed` is called with every job that was listed, added
    or changed, `deleted` with every one that is gone, including those that a broken watch had missed.
    `synced` is set when all listed jobs have been passed on."""

    def __init__(
        self,
        api: Api,
        jobs: JobCache,
        changed: Callable[[Json], None],
        deleted: Callable[[Json], None],
        namespaces: Sequence[str] = (),
    ) -> None:
        super().__init__(
            api,
            path=ALL_JOBS,
            kind=PLURAL,
            sink=lambda namespace: _Jobs(jobs, changed, deleted, namespace, self.settle),
            namespaces=namespaces,
            reader=Reader(
                item=partial(read_job, read=json_codec.read), event=partial(read_event, read=json_codec.read)
            ),
        )


class _Jobs:
    """Sink of the watch: events of one job within `BATCH_S` are merged into the last of them. A deletion is
    passed on at once."""

    def __init__(
        self,
        jobs: JobCache,
        changed: Callable[[Json], None],
        deleted: Callable[[Json], None],
        namespace: str | None,
        synced: Callable[[str | None], None],
    ) -> None:
        self._jobs, self._changed, self._deleted = jobs, changed, deleted
        self._namespace, self._synced = namespace, synced
        self._held: dict[str, Json] = {}
        """Jobs that wait, by UID, in the order of their first event."""
        self._is_listed = False

    def key(self, item: Json) -> str:
        return str(item["metadata"]["uid"])

    def put(self, item: Json) -> None:
        if not self._held:
            asyncio.get_running_loop().call_later(BATCH_S, self._hand_over)
        # Reduced now: a thousand jobs that wait must not be kept in full.
        self._held[self.key(item)] = kept(with_kind(item))

    def remove(self, item: Json) -> None:
        self._held.pop(item["metadata"]["uid"], None)
        self._deleted(item)

    def listed(self, keys: set[str], version: int) -> None:
        for uid, job in list(self._held.items()):
            if uid not in keys and version_of(job) <= version:
                del self._held[uid]
        for key, job in self._jobs:
            known = self._namespace in (None, key.namespace) and version_of(job) <= version
            if known and job["metadata"]["uid"] not in keys:
                self._deleted(job)
        self._is_listed = True
        if not self._held:
            self._synced(self._namespace)

    def _hand_over(self) -> None:
        batch = [self._held.pop(uid) for uid in list(islice(self._held, BATCH_SIZE))]
        if self._held:
            asyncio.get_running_loop().call_later(0.0, self._hand_over)
        for job in batch:
            try:
                self._changed(job)
            except Exception:
                # A job that cannot be handled must not keep the others from being passed on.
                log.exception("cannot handle an event of the job with UID %s", job["metadata"]["uid"])
        if self._is_listed and not self._held:
            self._synced(self._namespace)


PODS_PATH = "/api/v1/pods"


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
            path=PODS_PATH,
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
