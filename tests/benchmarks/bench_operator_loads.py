"""Loads of pods by creator (zerotrain, Jobs of two kinds, none), and the time until all of them run."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from tests.benchmarks.bench_operator_cluster import Meter, Spent
from tests.operator.operator_process import OperatorProcess
from tests.support.devcluster import Cluster
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.api import Api, Request
from zerotrain.operator.cluster.errors import ApiError, NotFound
from zerotrain.operator.resources import ResourceOptions, worker_pod

Json = dict[str, Any]

IN_FLIGHT = 64
"""Creations in flight, for every contender."""
DRAIN_S = 3.0
"""Seconds after the last pod runs in which its effects (status, endpoints, events) still cost CPU time.
"""
TIMEOUT_S = 600.0
STAYS = {"devcluster.zerotrain.dev/exit-code": "0", "devcluster.zerotrain.dev/exit-after": "6h"}
"""Annotations that keep pods of batch/v1 Jobs running, which otherwise succeed at once on simulated nodes.
"""
REQUESTS = {"cpu": "100m", "memory": "1Gi"}


@dataclass(frozen=True, kw_only=True)
class Size:
    """Number of jobs, and of pods per job."""

    jobs: int
    workers: int

    @property
    def pods(self) -> int:
        return self.jobs * self.workers

    def __str__(self) -> str:
        return f"{self.jobs:,} x {self.workers:,}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measurement."""

    running_s: float
    """Seconds from the first creation until all pods run."""
    created_s: float
    """Seconds until the benchmark's own creations were answered."""
    spent: Spent
    """Use of the cluster from the first creation until DRAIN_S after all pods ran."""


def zerotrain_job(namespace: str, name: str, workers: int, **spec: Any) -> Json:
    """Return a job as users write it, without a checkpoint volume, which simulated nodes cannot mount."""
    body = {
        "workers": workers,
        "image": "localhost/zerotrain:dev",
        "config": {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}},
        "model": {"gpt": {"dModel": 64, "layers": 2, "heads": 2, "context": 64}},
        "data": {"path": "builtin:python-stdlib"},
        "steps": 100,
        "resources": REQUESTS,
        "podTemplate": {"annotations": STAYS},
    }
    return {
        "apiVersion": "zerotrain.dev/v1alpha1",
        "kind": "ZeroTrainingJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {**body, **spec},
    }


def plain_job(namespace: str, name: str, workers: int) -> Json:
    """Return a minimal Indexed Job: one container, no volumes, no Service."""
    return _indexed_job(namespace, name, workers, {"metadata": {"annotations": STAYS}, "spec": _pod_spec()})


def our_pod_template(namespace: str, workers: int) -> Json:
    """Return the content of zerotrain's pods: volumes, security, environment, probe.

    The operator does not know their labels.
    """
    job = zerotrain_job(namespace, "job-0", workers)
    job["metadata"]["uid"] = str(uuid.UUID(int=0))
    pod = worker_pod(ZeroTrainingJob.parse(job), 1, 0, ResourceOptions())
    labels = {key.replace("/", "-"): value for key, value in pod["metadata"]["labels"].items()}
    spec = {key: value for key, value in pod["spec"].items() if key != "hostname"}
    return {"metadata": {"annotations": STAYS, "labels": labels}, "spec": spec}


def _indexed_job(namespace: str, name: str, workers: int, template: Json) -> Json:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "completionMode": "Indexed",
            "completions": workers,
            "parallelism": workers,
            "template": template,
        },
    }


def bare_pod(namespace: str, name: str) -> Json:
    meta = {"name": name, "namespace": namespace, "annotations": STAYS}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": _pod_spec()}


def _pod_spec() -> Json:
    container = {"name": "main", "image": "simulated", "resources": {"requests": REQUESTS}}
    return {"restartPolicy": "Never", "containers": [container]}


def zerotrain(namespace: str, size: Size) -> Iterable[Json]:
    return (zerotrain_job(namespace, f"job-{number}", size.workers) for number in range(size.jobs))


def plain(namespace: str, size: Size) -> Iterable[Json]:
    return (plain_job(namespace, f"job-{number}", size.workers) for number in range(size.jobs))


def same_pods(namespace: str, size: Size) -> Iterable[Json]:
    template = our_pod_template(namespace, size.workers)
    return (_indexed_job(namespace, f"job-{number}", size.workers, template) for number in range(size.jobs))


def bare(namespace: str, size: Size) -> Iterable[Json]:
    return (bare_pod(namespace, f"pod-{number}") for number in range(size.pods))


def same_bare(namespace: str, size: Size) -> Iterable[Json]:
    pod = {"apiVersion": "v1", "kind": "Pod", **our_pod_template(namespace, size.workers)}
    for number in range(size.pods):
        meta = {**pod["metadata"], "name": f"pod-{number}", "namespace": namespace}
        yield {**pod, "metadata": meta}


CONTENDERS: dict[str, Callable[[str, Size], Iterable[Json]]] = {
    "zerotrain": zerotrain,
    "plain Jobs": plain,
    "Jobs of our pods": same_pods,
    "our pods, bare": same_bare,
    "bare pods": bare,
}
"""Contenders whose objects are posted in any order; `Bench.makers` has the others."""
_COLLECTIONS = {
    "ZeroTrainingJob": "/apis/zerotrain.dev/v1alpha1/namespaces/{}/zerotrainingjobs",
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Service": "/api/v1/namespaces/{}/services",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "Event": "/apis/events.k8s.io/v1/namespaces/{}/events",
}


def collection(kind: str, namespace: str) -> str:
    return _COLLECTIONS[kind].format(namespace)


async def _post_all(
    bodies: Callable[[str, Size], Iterable[Json]], bench: Bench, namespace: str, size: Size
) -> None:
    await bench.create(bodies(namespace, size))


class RunningWatch:
    """Counter of the running pods of a namespace, on its own thread and without parsing JSON."""

    def __init__(self, cluster: Cluster, namespace: str, *, labels: str = "") -> None:
        self.times: list[float] = []
        """Times at which each pod was first seen running, on the monotonic clock."""
        self._seen: set[bytes] = set()
        self._closed = False
        self._cluster = cluster
        self._tls = ssl.create_default_context(cadata=cluster.ca.decode())
        query = f"watch=true&fieldSelector=status.phase%3DRunning&labelSelector={labels.replace('=', '%3D')}"
        self._path = f"{collection('Pod', namespace)}?{query}"
        self._connect()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _connect(self) -> None:
        """Connect a watch that begins with the present state, so that it can replace a lost one."""
        address = urlsplit(self._cluster.api_url)
        self._connection = http.client.HTTPSConnection(
            address.hostname or "", address.port, context=self._tls
        )
        headers = {"Authorization": f"Bearer {self._cluster.token}"}
        self._connection.request("GET", self._path, headers=headers)
        self._response = self._connection.getresponse()

    def _run(self) -> None:
        while not self._closed:
            # The API server ends a watch whose reader is too slow for it, as on a busy machine.
            with suppress(OSError, ValueError, AttributeError, http.client.HTTPException):
                self._read()
                if not self._closed:
                    time.sleep(0.05)
                    self._connect()

    def _read(self) -> None:
        for line in self._response:
            if line.startswith(b'{"type":"ADDED"'):
                name = line[line.index(b'"name":"') :].split(b'"', 4)[3]
                if name not in self._seen:
                    self._seen.add(name)
                    self.times.append(time.monotonic())

    async def reached(self, number: int, *, timeout_s: float = TIMEOUT_S) -> float:
        """Return the time at which so many pods ran. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while len(self.times) < number:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self.times)} of {number} pods ran within {timeout_s:.0f} s")
            await asyncio.sleep(0.01)
        return self.times[number - 1]

    def close(self) -> None:
        self._closed = True
        sock = self._connection.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # a close alone would leave the thread in its read
        self._thread.join(timeout=5)
        self._connection.close()


class Bench:
    """A cluster, the operator in it and the means to load both."""

    def __init__(self, cluster: Cluster, api: Api, meter: Meter) -> None:
        self.cluster, self.api, self.meter = cluster, api, meter
        self.makers: dict[str, Callable[[Bench, str, Size], Awaitable[None]]] = {
            name: partial(_post_all, bodies) for name, bodies in CONTENDERS.items()
        }
        """Functions that create each contender's pods, in the order of a round."""
        self._numbers = itertools.count(1)

    async def namespace(self) -> str:
        """Create a namespace in which pods can be created."""
        name = f"bench-{next(self._numbers)}"
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await self._call("POST", "/api/v1/namespaces", body)
        while True:
            try:
                await self._call("GET", f"/api/v1/namespaces/{name}/serviceaccounts/default")
                return name
            except NotFound:
                await asyncio.sleep(0.1)

    async def measure(
        self,
        contender: str,
        size: Size,
        operator: OperatorProcess,
        *,
        meanwhile: Callable[[RunningWatch], Any] | None = None,
    ) -> Run:
        """Create, wait until all pods run, count, clean up. `meanwhile` may disturb the start."""
        namespace = await self.namespace()
        watch = RunningWatch(self.cluster, namespace)
        try:
            before = await self.meter.all(operator)
            disturbing = asyncio.ensure_future(meanwhile(watch)) if meanwhile is not None else None
            started = time.monotonic()
            await self.makers[contender](self, namespace, size)
            created = time.monotonic()
            running = await watch.reached(size.pods)
            if disturbing is not None:
                await disturbing
            await asyncio.sleep(DRAIN_S)
            cpu = self.meter.cpu(operator)
            counted = await self.meter.requests(operator)
        finally:
            watch.close()
            await self.clean(namespace)
        after = counted.with_cpu(cpu)
        return Run(
            running_s=running - started,
            created_s=created - started,
            spent=Spent.between(before, after),
        )

    async def create(self, bodies: Iterable[Json]) -> None:
        """Create all of them, IN_FLIGHT at a time."""
        rest = iter(bodies)

        async def work() -> None:
            for body in rest:
                await self.post(body)

        await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))

    async def get(self, path: str) -> Json:
        return await self._call("GET", path)

    async def post(self, body: Json) -> Json:
        return await self._call("POST", collection(body["kind"], body["metadata"]["namespace"]), body)

    async def put_status(self, job: Json) -> Json:
        """Write the status as the operator does: with the metadata that names the version and no spec."""
        meta = {key: job["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
        path = f"{collection(job['kind'], meta['namespace'])}/{meta['name']}/status"
        body = {key: job[key] for key in ("apiVersion", "kind", "status")}
        return await self._call("PUT", path, {**body, "metadata": meta})

    async def patch(self, path: str, body: Json) -> None:
        await self.api.call(
            Request(
                method="PATCH",
                path=path,
                kind="patch",
                body=body,
                content_type="application/merge-patch+json",
            )
        )

    async def list(self, kind: str, namespace: str, **params: str) -> list[Json]:
        """Return all items, read in pages."""
        items: list[Json] = []
        params = {"limit": "500", **params}
        while True:
            answer = await self._call("GET", collection(kind, namespace), params=params)
            items += answer["items"]
            if not answer["metadata"].get("continue"):
                return items
            params["continue"] = answer["metadata"]["continue"]

    async def clean(self, namespace: str) -> None:
        """Delete everything and wait, so that the next measurement finds a quiet cluster."""
        for kind in ("ZeroTrainingJob", "Job", "Pod", "Service"):  # Services that jobs share stay for a while
            await self._delete_all(kind, namespace)
        for kind in ("Pod", "Service"):
            while await self._any(kind, namespace):
                await asyncio.sleep(0.5)
                if kind == "Pod":
                    await self._delete_all(kind, namespace)

    async def _delete_all(self, kind: str, namespace: str) -> None:
        body = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
        with suppress(ApiError):
            await self._call("DELETE", collection(kind, namespace), body)

    async def _any(self, kind: str, namespace: str) -> bool:
        answer = await self._call("GET", collection(kind, namespace), params={"limit": "1"})
        return bool(answer["items"])

    async def _call(
        self, method: str, path: str, body: Json | None = None, *, params: dict[str, str] | None = None
    ) -> Json:
        request = Request(method=method, path=path, kind="bench", body=body, params=params or {})
        return await self.api.call(request)
