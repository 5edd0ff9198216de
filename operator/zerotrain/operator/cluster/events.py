"""Kubernetes events on jobs. The name is a hash of the content, so that each event is made once, across
operator restarts.

No pass waits for its events, as with the recorder of client-go: they are sent concurrently with the passes, a
few at a time. Events that are not sent yet are lost when the operator is killed; the status contains the same
information.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime

from zerotrain.contract.text import one_line, word
from zerotrain.operator.cluster.api import Answer, Api, Json, Request
from zerotrain.operator.cluster.errors import AlreadyExists, ApiError
from zerotrain.operator.cluster.limits import KeyedBuckets
from zerotrain.operator.constants import MANAGER
from zerotrain.operator.reconcile import Event

log = logging.getLogger(__name__)

MAX_REMEMBERED = 5_000
MAX_NOTE_BYTES = 1_024

BURST, EVERY_S, MAX_JOBS = 50, 10.0, 20_000
"""Limit on the events of one job: a burst of BURST, then one every EVERY_S seconds; MAX_JOBS budgets are
kept. A tenant's program may cause events, and with a different text each time."""


MAX_WAITING = 5_000
"""Maximum of events that wait to be sent. Further ones are dropped: an API server that accepts no events must
not fill the operator's memory."""

MAX_WAITING_OF_ONE = 1_000
"""Maximum of waiting events of one namespace, whose jobs must not crowd out the events of others."""

AT_ONCE = 8
"""Number of events that are sent at a time, over all jobs."""


class EventWriter:
    """Sender of events; a lost event is logged and never a reason to repeat a pass."""

    def __init__(self, api: Api, *, instance: str) -> None:
        self._api, self._instance = api, instance
        self._written: OrderedDict[str, None] = OrderedDict()
        """Names of the events that were sent or are queued."""
        self._budgets = KeyedBuckets(burst=BURST, every_s=EVERY_S, max_keys=MAX_JOBS)
        self._waiting: asyncio.Queue[Json] = asyncio.Queue(MAX_WAITING)
        self._waiting_of: Counter[str] = Counter()
        """Number of waiting events by namespace."""

    def emit(self, job: Json, events: Iterable[Event]) -> None:
        """Queue these events of the job, with the present time."""
        for event in events:
            body = event_body(job, event, instance=self._instance, now=datetime.now(UTC))
            name = body["metadata"]["name"]
            if name in self._written:
                continue
            namespace = body["metadata"]["namespace"]
            is_full = self._waiting.full() or self._waiting_of[namespace] >= MAX_WAITING_OF_ONE
            if is_full or not self._budgets.try_take(job["metadata"]["uid"]):
                log.info(
                    "%s: event %s is dropped: too many are queued",
                    job["metadata"]["name"],
                    event.reason,
                )
                continue
            self._waiting.put_nowait(body)
            self._waiting_of[namespace] += 1
            self._remember(name)

    async def run(self) -> None:
        """Send queued events until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._send_all())

    async def drain(self, within_s: float) -> int:
        """Wait until all events were sent, at most `within_s` seconds. Return how many still wait."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._waiting.join()
        return self._waiting.qsize()

    async def _send_all(self) -> None:
        while True:
            body = await self._waiting.get()
            self._waiting_of -= Counter((body["metadata"]["namespace"],))  # without entries that are 0
            try:
                await self._send(body)
            finally:
                self._waiting.task_done()

    async def _send(self, body: Json) -> None:
        meta = body["metadata"]
        path = f"/apis/events.k8s.io/v1/namespaces/{meta['namespace']}/events"
        request = Request(
            method="POST", path=path, kind="events", body=body, answer=Answer.METADATA, retries=2
        )
        try:
            await self._api.call(request)
        except AlreadyExists:
            pass
        except ApiError as error:
            job = body["regarding"]["name"]
            log.warning("event %s of %s was not written: %s", body["reason"], job, error)
            self._written.pop(meta["name"], None)

    def _remember(self, name: str) -> None:
        self._written[name] = None
        while len(self._written) > MAX_REMEMBERED:
            self._written.popitem(last=False)


def event_body(job: Json, event: Event, *, instance: str, now: datetime) -> Json:
    """Return an events.k8s.io/v1 object; `kubectl describe` shows it like a core event."""
    meta = job["metadata"]
    identity = "\n".join((meta["uid"], str(event.attempt), event.reason, event.message))
    digest = hashlib.sha256(identity.encode(errors="replace")).hexdigest()[:16]
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{meta['name']}.{digest}", "namespace": meta["namespace"]},
        "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": MANAGER,
        "reportingInstance": instance[:128],
        "action": "Reconcile",
        "reason": word(event.reason),
        "type": str(event.type),
        "note": one_line(event.message).encode(errors="replace")[:MAX_NOTE_BYTES].decode(errors="ignore"),
        "regarding": {
            "apiVersion": job["apiVersion"],
            "kind": job["kind"],
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        },
    }
