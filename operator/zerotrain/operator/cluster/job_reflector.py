"""Reflector that keeps the operator's cache of jobs equal to the cluster."""

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
from zerotrain.operator.cluster.store import version_of
from zerotrain.operator.constants import PLURAL

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
