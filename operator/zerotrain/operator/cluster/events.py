"""Kubernetes events on jobs. A name made of what is told makes each event once, across operator restarts."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterable
from datetime import UTC, datetime

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


class EventWriter:
    """Writes the events of a plan; a lost event is logged, never a reason to repeat a pass."""

    def __init__(self, api: Api, *, instance: str) -> None:
        self._api, self._instance = api, instance
        self._written: OrderedDict[str, None] = OrderedDict()
        self._budgets = Budgets(burst=BURST, every_s=EVERY_S, max_keys=MAX_JOBS)

    async def write(self, job: Json, events: Iterable[Event]) -> None:
        for event in events:
            body = event_body(job, event, instance=self._instance, now=datetime.now(UTC))
            name = body["metadata"]["name"]
            if name in self._written:
                continue
            if not self._budgets.spend(job["metadata"]["uid"]):
                log.info("%s: event %s is left out, it has too many", job["metadata"]["name"], event.reason)
                continue
            path = f"/apis/events.k8s.io/v1/namespaces/{job['metadata']['namespace']}/events"
            try:
                await self._api.call(
                    Request(
                        method="POST", path=path, kind="events", body=body, answer=Answer.METADATA, retries=2
                    )
                )
            except AlreadyExists:
                pass
            except ApiError as error:
                log.warning(
                    "event %s of %s was not written: %s", event.reason, job["metadata"]["name"], error
                )
                continue
            self._remember(name)

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
        "reason": event.reason,
        "type": str(event.type),
        "note": event.message.encode(errors="replace")[:MAX_NOTE_BYTES].decode(errors="ignore"),
        "regarding": {
            "apiVersion": job["apiVersion"],
            "kind": job["kind"],
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        },
    }
