"""Kubernetes events on jobs. A name made of what is told makes each event once, across operator restarts.

No pass waits for its events, as nobody waits for those of client-go's recorder: they are sent beside the
passes, a few at a time. Those that were not sent yet are lost where the operator is killed; status says what
they would have said.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterable
from datetime import UTC, datetime

from zerotrain.contract.text import one_line, word
from zerotrain.operator.cluster.api import Answer, Api, Json, Request
from zerotrain.operator.cluster.errors import AlreadyExists, ApiError
from zerotrain.operator.cluster.rate import Budgets
from zerotrain.operator.constants import MANAGER
from zerotrain.operator.reconcile import Event

log = logging.getLogger(__name__)

MAX_REMEMBERED = 5_000
MAX_NOTE_BYTES = 1_024

BURST, EVERY_S, MAX_JOBS = 50, 10.0, 20_000
"""Events of one job: so many at once, then one in so many seconds. What a tenant's program says may become an
event, and it may say something else each time."""


MAX_WAITING = 5_000
"""More than these are left out: an API server that takes no events must not fill the operator's memory."""

AT_ONCE = 8
"""Sent at a time, of all jobs."""


class EventWriter:
    """Sends what it is told; a lost event is logged, never a reason to repeat a pass."""

    def __init__(self, api: Api, *, instance: str) -> None:
        self._api, self._instance = api, instance
        self._written: OrderedDict[str, None] = OrderedDict()
        """Names of those that were sent or are on their way."""
        self._budgets = Budgets(burst=BURST, every_s=EVERY_S, max_keys=MAX_JOBS)
        self._waiting: asyncio.Queue[Json] = asyncio.Queue(MAX_WAITING)

    def tell(self, job: Json, events: Iterable[Event]) -> None:
        """Have these events of the job sent, with this moment as their time."""
        for event in events:
            body = event_body(job, event, instance=self._instance, now=datetime.now(UTC))
            name = body["metadata"]["name"]
            if name in self._written:
                continue
            if self._waiting.full() or not self._budgets.spend(job["metadata"]["uid"]):
                log.info(
                    "%s: event %s is left out, there are too many", job["metadata"]["name"], event.reason
                )
                continue
            self._waiting.put_nowait(body)
            self._remember(name)

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._send_all())

    async def drain(self, within_s: float) -> int:
        """Wait until all were sent, but no longer; how many wait still."""
        try:
            async with asyncio.timeout(within_s):
                await self._waiting.join()
        except TimeoutError:
            pass
        return self._waiting.qsize()

    async def _send_all(self) -> None:
        while True:
            body = await self._waiting.get()
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
    """events.k8s.io/v1; `kubectl describe` shows it as it shows core events."""
    meta = job["metadata"]
    told = "\n".join((meta["uid"], str(event.attempt), event.reason, event.message))
    digest = hashlib.sha256(told.encode(errors="replace")).hexdigest()[:16]
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
