"""Use of a simulated cluster between two moments: processor time by process, requests by client.

For bench_operator. The API server's own counters do not name the client. The operator and the benchmark
therefore count their own requests, the scheduler and the controllers are distinguished by their flow schemas,
and the rest are the simulated nodes'.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.operator.operator_process import OperatorProcess
from tests.support.devcluster import Cluster, Devcluster
from zerotrain.operator.cluster.api import Api, ApiLimits, Request
from zerotrain.operator.cluster.connection import connect
from zerotrain.operator.cluster.telemetry import Telemetry

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
UNLIMITED = ApiLimits(requests_per_second=1e6, burst=1_000_000, timeout_s=60)
EVENTS = "events"
CLIENT_OF_FLOW = {
    "kube-scheduler": "scheduler",
    "system-kube-scheduler": "scheduler",
    "kube-controller-manager": "controllers",
    "kube-system-service-accounts": "controllers",
    "endpoint-controller": "controllers",
}
_REQUESTS = re.compile(r"^apiserver_request_total\{(.*)\} (\S+)$", re.MULTILINE)
_DISPATCHED = re.compile(r"^apiserver_flowcontrol_dispatched_requests_total\{(.*)\} (\S+)$", re.MULTILINE)
_ALLOCATED = re.compile(r"^go_memstats_alloc_bytes_total (\S+)$", re.MULTILINE)
_OWN = re.compile(r"^zerotrain_operator_api_requests_total\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class CountingTelemetry(Telemetry):
    """Counts of the benchmark's own requests."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def request(self, verb: str, resource: str, code: int, seconds: float | None = None) -> None:
        if verb != "WATCH":
            self.count += 1


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All counters at one moment."""

    at: float
    cpu_s: Mapping[str, float]
    """Processor time by process: the components' names, `operator` and `bench`."""
    machine_cpu_s: float
    requests: float = 0.0
    """Requests of all clients without leases and watches."""
    by_client: Mapping[str, float] = field(default_factory=dict)
    allocated_bytes: float = 0.0
    """Bytes that the API server has ever allocated: the cost of its work whatever else the machine does."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The difference of two snapshots."""

    seconds: float
    cpu_s: Mapping[str, float]
    machine_cpu_s: float
    requests: float
    by_client: Mapping[str, float]
    allocated_bytes: float

    @property
    def total_cpu_s(self) -> float:
        """Return the time of the cluster, the operator and the benchmark, which creates the jobs."""
        return sum(self.cpu_s.values())

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot) -> Spent:
        return cls(
            seconds=after.at - before.at,
            cpu_s=_minus(after.cpu_s, before.cpu_s),
            machine_cpu_s=after.machine_cpu_s - before.machine_cpu_s,
            requests=after.requests - before.requests,
            by_client=_minus(after.by_client, before.by_client),
            allocated_bytes=after.allocated_bytes - before.allocated_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Counters of the API server's own metrics."""

    requests: float
    by_client: Mapping[str, float]
    allocated_bytes: float

    def with_cpu(self, cpu: Snapshot) -> Snapshot:
        return replace(
            cpu,
            requests=self.requests,
            by_client=self.by_client,
            allocated_bytes=self.allocated_bytes,
        )


class Meter:
    """Reader of the counters of one cluster, of the operator beside it and of this process."""

    def __init__(
        self, devcluster: Devcluster, cluster: Cluster, api: Api, telemetry: CountingTelemetry
    ) -> None:
        self._api, self._telemetry = api, telemetry
        components = devcluster.status(cluster.name)["components"]
        self._pids = {item["name"]: int(item["pid"]) for item in components if item.get("pid")}

    def cpu(self, operator: OperatorProcess | None) -> Snapshot:
        """Return a snapshot without requests: counting these costs the API server much of a second."""
        pids = {**self._pids, "bench": os.getpid()}
        if operator is not None:
            pids["operator"] = operator.pid
        return Snapshot(
            at=time.monotonic(),
            cpu_s={name: process_cpu_s(pid) for name, pid in pids.items()},
            machine_cpu_s=machine_cpu_s(),
        )

    async def all(self, operator: OperatorProcess | None) -> Snapshot:
        """Return all counters.

        The processor time is read last, so that a window begins after the counting.
        """
        counted = await self.requests(operator)
        return counted.with_cpu(self.cpu(operator))

    async def requests(self, operator: OperatorProcess | None) -> Counted:
        text = (await self._api.call_raw(Request(method="GET", path="/metrics", kind="metrics"))).decode()
        total = sum(
            value
            for labels, value in _samples(_REQUESTS, text)
            if labels["verb"] not in ("WATCH", "CONNECT") and labels.get("resource", "") not in ("", "leases")
        )
        clients: dict[str, float] = {"bench": self._telemetry.count}
        for labels, value in _samples(_DISPATCHED, text):
            client = CLIENT_OF_FLOW.get(labels["flow_schema"])
            if client is not None:
                clients[client] = clients.get(client, 0.0) + value
        if operator is not None:
            clients |= operator_requests(operator)
        allocated = _ALLOCATED.search(text)
        return Counted(
            requests=total, by_client=clients, allocated_bytes=float(allocated[1]) if allocated else 0.0
        )


def operator_requests(operator: OperatorProcess) -> dict[str, float]:
    """Return the operator's own count without leases and watches, with events as a separate entry."""
    found = {"operator": 0.0, f"operator {EVENTS}": 0.0}
    for labels, value in _samples(_OWN, operator.get("/metrics")):
        if labels["verb"] != "WATCH" and labels["resource"] != "leases":
            found[f"operator {EVENTS}" if labels["resource"] == EVENTS else "operator"] += value
    return found


def operator_writes(operator: OperatorProcess, resource: str) -> float:
    """Return the number of requests so far to one resource that are not reads."""
    samples = _samples(_OWN, operator.get("/metrics"))
    return sum(
        value
        for labels, value in samples
        if labels["resource"] == resource and labels["verb"] not in ("GET", "WATCH")
    )


async def open_api(kubeconfig: Path) -> tuple[Api, CountingTelemetry]:
    """Return the operator's client with the administrator's rights and without limits; a context manager."""
    telemetry = CountingTelemetry()
    return Api(await connect(kubeconfig), UNLIMITED, telemetry), telemetry


def process_cpu_s(pid: int) -> float:
    """Return user and system time of a process and of its children that ended; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(value) for value in fields[11:15]) / TICKS_PER_S


def process_memory_bytes(pid: int) -> tuple[int, int]:
    """Return resident bytes now and at the peak."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB$", text, re.MULTILINE))
    return int(found["VmRSS"]) << 10, int(found["VmHWM"]) << 10


def machine_cpu_s() -> float:
    """Return the busy time of all processors: everything but idle and waiting for disks."""
    fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _wait, irq, soft = fields[:7]
    return (user + nice + system + irq + soft) / TICKS_PER_S


def latency_quantile(metrics: str, name: str, share: float, **where: str) -> float:
    """Return a quantile of an operator's histogram over the series with these labels.

    It is interpolated within its bucket; NaN without samples.
    """
    pattern = re.compile(rf"^{name}_bucket\{{(.*)\}} (\S+)$", re.MULTILINE)
    buckets = [
        (float(labels["le"]), value)
        for labels, value in _samples(pattern, metrics)
        if where.items() <= labels.items()
    ]
    if not buckets or not buckets[-1][1]:
        return float("nan")
    wanted, lower, below = share * buckets[-1][1], 0.0, 0.0
    for upper, count in buckets:
        if count >= wanted:
            if upper == float("inf"):
                return lower
            return lower + (upper - lower) * (wanted - below) / max(count - below, 1.0)
        lower, below = upper, count
    return lower


def _samples(pattern: re.Pattern[str], text: str) -> list[tuple[dict[str, str], float]]:
    return [(dict(_LABEL.findall(labels)), float(value)) for labels, value in pattern.findall(text)]


def _minus(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
