"""Leader election over a Lease, as plain JSON through the same client. The lease lasts 15 s, is renewed every
2 s, and is given up after 10 s without a renewal.

The identity is the pod's UID, so that a container that is restarted in its pod takes over at once. The holder
releases the lease when it ends. A holder that dies is succeeded within LEASE_S + RETRY_S, 17 s, plus the time
of a request: a standby replica sees a renewal RETRY_S late at most and asks again when the lease ends. Times
are counted by the monotonic clock from what this process saw: the wall clocks of two nodes are never
compared, and one that jumps neither steals a lease nor loses one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from zerotrain.operator.cluster.api import Api, Json, Request
from zerotrain.operator.cluster.errors import ApiError, NotFound, Unavailable

log = logging.getLogger(__name__)

LEASE_S, RENEW_S, RETRY_S = 15.0, 10.0, 2.0


class ApiLease:
    """Client for the Lease object. A request without an answer counts as "not now", never as an error."""

    def __init__(self, api: Api, *, namespace: str, name: str, identity: str) -> None:
        self.name, self.namespace, self.identity = name, namespace, identity
        self._api = api
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._body: Json | None = None
        """Lease as it was last read or written; None when there is none."""

    @property
    def holder(self) -> str:
        """Return the holder that was last seen; empty when there was none."""
        return str(self._body["spec"].get("holderIdentity") or "") if self._body is not None else ""

    @property
    def version(self) -> tuple[str, str]:
        """Return a value that changes with every renewal, and when another replica takes the lease."""
        spec = self._body["spec"] if self._body is not None else {}
        return self.holder, str(spec.get("renewTime", ""))

    @property
    def duration_s(self) -> float:
        """Return the duration that the holder of the lease has set, in seconds."""
        spec = self._body["spec"] if self._body is not None else {}
        return float(spec.get("leaseDurationSeconds") or LEASE_S)

    async def read(self) -> bool:
        """Read the lease. Return whether the API server answered."""
        try:
            self._body = await self._call("GET", f"{self._path}/{self.name}")
        except NotFound:
            self._body = None
        except ApiError as error:
            log.info("lease %s: %s", self.name, error)
            return False
        return True

    async def write(self, holder: str) -> bool:
        """Take, renew or release the lease that was last seen. Return False when another replica wrote since,
        or without an answer."""
        spec = _spec(holder, self._body["spec"] if self._body is not None else None)
        method, path = "PUT", f"{self._path}/{self.name}"
        body = {**self._body, "spec": spec} if self._body is not None else {}
        if self._body is None:
            meta = {"name": self.name, "namespace": self.namespace}
            method, path = "POST", self._path
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": spec}
        try:
            self._body = await self._call(method, path, body)
        except NotFound as error:
            log.warning(
                "cannot renew lease %s, so no replica leads: %s; create the namespace %s or set "
                "ZEROTRAIN_OPERATOR_NAMESPACE to one that exists",
                self.name,
                error,
                self.namespace,
            )
            return False
        except ApiError as error:
            log.info("lease %s: %s", self.name, error)
            return False
        return True

    async def _call(self, method: str, path: str, body: Json | None = None) -> Json:
        # No retries: the election's loop repeats the request and counts the time. The rate limit does not
        # delay it either.
        request = Request(method=method, path=path, kind="leases", body=body, retries=0, urgent=True)
        try:
            async with asyncio.timeout(RENEW_S / 2):
                return await self._api.call(request)
        except TimeoutError as error:
            raise Unavailable(f"{method} {path}: no answer within {RENEW_S / 2} s") from error


class Leadership:
    """Leader election of this replica for as long as `run()` runs; `held` is set while this replica is the
    leader."""

    def __init__(
        self,
        lease: ApiLease,
        *,
        gained: Callable[[], None],
        lost: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease, self._gained, self._lost, self._clock = lease, gained, lost, clock
        self.held = asyncio.Event()
        self._renewed_at = 0.0
        self._seen: tuple[str, str] | None = None
        self._seen_at = 0.0

    @property
    def fresh(self) -> bool:
        """Return whether this replica leads and cannot have been succeeded yet. A process that was stopped
        for longer than the lease finds out here, before its first request, that another replica may lead."""
        return self.held.is_set() and self._clock() - self._renewed_at < RENEW_S

    async def run(self) -> None:
        try:
            while True:
                pause_s = await self.campaign()
                await asyncio.sleep(pause_s)
        finally:
            was_leader = self.held.is_set()
            self._step_down()
            if was_leader:
                await asyncio.shield(self._give_back())

    async def campaign(self) -> float:
        """Do one round: renew the lease, take it if it is free, or wait. Return the seconds until the next
        round."""
        if self.held.is_set():
            await self._renew()
            return RETRY_S
        if not await self._lease.read():
            return RETRY_S
        left_s = self._left_s()
        if left_s <= 0:
            await self._take()
            return RETRY_S
        return min(RETRY_S, left_s)

    def _left_s(self) -> float:
        """Return the seconds for which the lease still belongs to another replica."""
        lease, now = self._lease, self._clock()
        if lease.holder in ("", lease.identity):
            return 0.0
        if lease.version != self._seen:
            self._seen, self._seen_at = lease.version, now
        return self._seen_at + lease.duration_s - now

    async def _take(self) -> None:
        if await self._written():
            log.info("leading as %s", self._lease.identity)
            self.held.set()
            self._gained()

    async def _renew(self) -> None:
        if await self._written():
            return
        # Another replica wrote, or there was no answer: a lease that another replica holds is lost at once.
        if await self._lease.read() and self._lease.holder != self._lease.identity:
            log.warning("%s holds the lease: this replica is on standby", self._lease.holder or "no replica")
            self._step_down()
        elif self._clock() - self._renewed_at >= RENEW_S:
            log.warning("the lease was not renewed in time: this replica is on standby")
            self._step_down()

    async def _written(self) -> bool:
        asked_at = self._clock()  # before the request: other replicas count from when they see the renewal
        if not await self._lease.write(self._lease.identity):
            return False
        self._renewed_at = asked_at
        return True

    async def _give_back(self) -> None:
        """Release the lease, so that the next holder need not wait for its end."""
        if await self._lease.read() and self._lease.holder == self._lease.identity:
            await self._lease.write("")

    def _step_down(self) -> None:
        if self.held.is_set():
            self.held.clear()
            self._lost()


def _spec(holder: str, old: Json | None) -> Json:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    same = old is not None and old.get("holderIdentity") == holder
    changes = int((old or {}).get("leaseTransitions", 0)) + (0 if same or old is None else 1)
    return {
        "holderIdentity": holder,
        "leaseDurationSeconds": int(LEASE_S) if holder else 1,
        "acquireTime": old["acquireTime"] if old is not None and same and "acquireTime" in old else now,
        "renewTime": now,
        "leaseTransitions": changes,
    }
