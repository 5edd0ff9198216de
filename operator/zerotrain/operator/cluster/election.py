"""Leader election with the library's algorithm over a Lease of ours, as plain JSON through the same client.

The identity is the pod's UID, so that a container that is restarted in its pod takes over at once. The holder
gives the lease back when it ends. A holder that dies is followed within LEASE_S + RETRY_S, 17 s, plus the
time of a request: who stands by sees a renewal RETRY_S late at most and asks again when the lease ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.baselock import BaseLock

from zerotrain.operator.cluster.api import Api, Json, Request
from zerotrain.operator.cluster.errors import ApiError, NotFound, Unavailable

log = logging.getLogger(__name__)

LEASE_S, RENEW_S, RETRY_S = 15, 10, 2
_NEVER = "1970-01-01T00:00:00.000000Z"


class ApiLease(BaseLock):
    """The Lease as the library's election wants it. No answer counts as "not now", never as an error:
    the election's own loop has no handler for lost connections."""

    def __init__(self, api: Api, *, namespace: str, name: str, identity: str) -> None:
        super().__init__(name, namespace, identity)
        self._api = api
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._held: Json | None = None
        self._ours_until = 0.0

    @property
    def fresh(self) -> bool:
        """Whether nobody else can hold the lease yet. A process that was stopped for longer than the lease
        knows here, before its first request, that it may have been followed; wall clocks play no part."""
        return time.monotonic() < self._ours_until

    async def get(self, name: str, namespace: str) -> tuple[bool, Any]:
        try:
            self._held = await self._call("GET", f"{self._path}/{name}")
        except ApiError as error:
            answer = ApiException(status=error.status, reason=str(error))
            answer.body = json.dumps({"code": error.status})
            return False, answer
        if self._held["spec"].get("holderIdentity") != self.identity:
            self._ours_until = 0.0
        return True, _record(self._held["spec"])

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        meta = {"name": name, "namespace": namespace}
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta}
        return await self._write("POST", self._path, {**body, "spec": _spec(election_record, None)})

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        if self._held is None:
            return False
        body = {**self._held, "spec": _spec(updated_record, self._held["spec"])}
        return await self._write("PUT", f"{self._path}/{name}", body)

    async def release(self) -> None:
        """Give the lease back if it is ours, so that the next holder need not wait for its end."""
        self._ours_until = 0.0
        found, _ = await self.get(self.name, self.namespace)
        if not found or self._held is None or self._held["spec"].get("holderIdentity") != self.identity:
            return
        spec = {**self._held["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
        await self._write("PUT", f"{self._path}/{self.name}", {**self._held, "spec": spec})

    async def _write(self, method: str, path: str, body: Json) -> bool:
        asked_at = time.monotonic()
        try:
            self._held = await self._call(method, path, body)
        except NotFound as error:
            log.warning(
                "lease %s cannot be kept, so nobody leads: %s; create the namespace %s or set "
                "ZEROTRAIN_OPERATOR_NAMESPACE to one that exists",
                self.name,
                error,
                self.namespace,
            )
            return False
        except ApiError as error:
            log.info("lease %s: %s", self.name, error)
            return False
        # From before the request: others count from when they see it.
        self._ours_until = asked_at + LEASE_S if body["spec"]["holderIdentity"] == self.identity else 0.0
        return True

    async def _call(self, method: str, path: str, body: Json | None = None) -> Json:
        # No retries: the election's loop is the retry, and it counts the time. Nor does it wait its turn.
        request = Request(method=method, path=path, kind="leases", body=body, retries=0, urgent=True)
        try:
            async with asyncio.timeout(RENEW_S / 2):
                return await self._api.call(request)
        except TimeoutError as error:
            raise Unavailable(f"{method} {path}: no answer within {RENEW_S / 2} s") from error


class Leadership:
    """Campaigns for as long as it runs; `held` is set while this replica is the leader."""

    def __init__(self, lease: ApiLease, *, gained: Callable[[], None], lost: Callable[[], None]) -> None:
        self._lease, self._gained, self._lost = lease, gained, lost
        self.held = asyncio.Event()
        self._leading: asyncio.Task[None] | None = None

    @property
    def fresh(self) -> bool:
        """Whether this replica leads and cannot have been followed yet."""
        return self.held.is_set() and self._lease.fresh

    async def run(self) -> None:
        try:
            while True:
                await _Election(self._config()).run()
        finally:
            was_leader = self.held.is_set()
            self._step_down()
            if self._leading is not None:
                self._leading.cancel()
            if was_leader:
                await asyncio.shield(self._lease.release())

    def _config(self) -> Config:
        return Config(self._lease, LEASE_S, RENEW_S, RETRY_S, self._lead, self._end)

    async def _lead(self) -> None:
        log.info("leading as %s", self._lease.identity)
        self._leading = asyncio.current_task()
        self.held.set()
        self._gained()
        await asyncio.Event().wait()

    async def _end(self) -> None:
        log.warning("the lease was not renewed in time: this replica stands by")
        self._step_down()

    def _step_down(self) -> None:
        if self.held.is_set():
            self.held.clear()
            self._lost()


class _Election(LeaderElection):
    """The library's, with the pauses of a follower cut where the lease that it watches ends."""

    async def acquire(self) -> bool:
        while not await self.try_acquire_or_renew():
            ends_ms = self.observed_time_milliseconds + LEASE_S * 1000
            left_s = (ends_ms - time.time() * 1000) / 1000
            await asyncio.sleep(min(RETRY_S, left_s + 0.02) if left_s > 0 else RETRY_S)
        return True


def _record(spec: Json) -> LeaderElectionRecord:
    # An empty holder means a lease that was given back: None makes the library take it without waiting.
    return LeaderElectionRecord(
        spec.get("holderIdentity") or None,
        str(spec.get("leaseDurationSeconds", LEASE_S)),
        spec.get("acquireTime", _NEVER),
        spec.get("renewTime", _NEVER),
    )


def _spec(record: LeaderElectionRecord, old: Json | None) -> Json:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    same = old is not None and old.get("holderIdentity") == record.holder_identity
    changes = int((old or {}).get("leaseTransitions", 0)) + (0 if same or old is None else 1)
    return {
        "holderIdentity": record.holder_identity,
        "leaseDurationSeconds": LEASE_S,
        # The library writes local time without a zone; a Lease is read by people in other zones.
        "acquireTime": old["acquireTime"] if old is not None and same and "acquireTime" in old else now,
        "renewTime": now,
        "leaseTransitions": changes,
    }
