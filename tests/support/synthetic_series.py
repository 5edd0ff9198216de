"""Series that a run on CPUs cannot have: of GPUs, of the operator, of failures and of alerts.

They are made from the catalogue of metrics and from the counters that the chart gives to dcgm-exporter, so
that no name is invented here; the values only grow. All other series come from real ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from prometheus_client.core import Metric

from tests.support.backfill import Scrape
from tests.support.metric_names import PROCESS
from zerotrain.contract.metrics import ALL_METRICS, MetricKind, MetricSpec, Source

COUNTERS = Path(__file__).resolve().parents[2] / "charts" / "zerotrain" / "files" / "dcgm" / "counters.csv"

OPEN_LABELS: Mapping[str, tuple[str, ...]] = {
    "phase": ("Running",),
    "verb": ("GET", "PATCH"),
    "resource": ("pods", "zerotrainingjobs"),
    "watched_namespace": ("",),
    "job_namespace": ("",),
    "code": ("200", "409"),
    "rank": ("0",),
    "reason": ("RankFailed",),
    "exit_code": ("137",),
    "exception": ("",),
    "version": ("0.1.0",),
    "zero_stage": ("3",),
    "queue": ("",),
}
"""Values of the labels for which the catalogue has no fixed values."""


WAITING_JOB = "waiting"
"""Name of a second job, for the panels about jobs that wait."""


def _waits(spec: MetricSpec) -> dict[str, str]:
    return {"phase": "Pending"} if "phase" in spec.labels else {}


def gpu_uuid(rank: int) -> str:
    return f"GPU-{rank:08d}"


def synthetic_scrapes(
    times: Sequence[float], *, namespace: str, job: str, pod: str, ranks: int
) -> list[Scrape]:
    """Return scrapes of the operator, the CUDA-only series of the ranks, DCGM's exporter and the alerts."""
    operator = {"namespace": "zerotrain-system", "pod": "operator-0", "job": "zerotrain-operator"}
    operator |= {"instance": "10.0.0.1:8080", "node": "node-0"}
    worker = {"namespace": namespace, "pod": pod, "node": "node-0", "job": "zerotrain-workers"}
    dcgm = {"namespace": "gpu-operator", "pod": "dcgm-exporter-0", "job": "dcgm-exporter"}
    found = []
    for index, at in enumerate(times):
        of_operator = tuple(_operator_families(index, at, namespace=namespace, job=job))
        of_ranks = tuple(_gpu_families(index, at, job=job, ranks=ranks))
        of_gpus = tuple(_dcgm_families(index, namespace=namespace, pod=pod, ranks=ranks))
        found += [
            Scrape(at=at, families=of_operator, target=operator),
            Scrape(at=at, families=of_ranks, target=worker),
            Scrape(at=at, families=of_gpus, target=dcgm),
            Scrape(at=at, families=(_alert(namespace, job),), target={}),
        ]
    return found


def _operator_families(index: int, at: float, *, namespace: str, job: str) -> Iterator[Metric]:
    for spec in ALL_METRICS:
        if spec.source is Source.OPERATOR:
            yield _family(spec, ({},), index, at)
        elif spec.source is Source.JOB:
            jobs: list[dict[str, str]] = [{"namespace": namespace, "job_name": job}]
            if spec.name.startswith("zerotrain_job_phase"):
                jobs.append({"namespace": namespace, "job_name": WAITING_JOB} | _waits(spec))
            yield _family(spec, jobs, index, at)
    for name in PROCESS:
        kind = "counter" if name.endswith("_total") else "gauge"
        metric = Metric(name.removesuffix("_total"), "of the process", kind)
        metric.add_sample(name, {}, at - 60 if "start_time" in name else 1.0 + index)
        yield metric


def _gpu_families(index: int, at: float, *, job: str, ranks: int) -> Iterator[Metric]:
    each_rank = tuple({"job_name": job, "rank": str(rank)} for rank in range(ranks))
    for spec in ALL_METRICS:
        if spec.source is Source.RANK and "GPU" in spec.only:
            yield _family(spec, each_rank, index, at)


def _dcgm_families(index: int, *, namespace: str, pod: str, ranks: int) -> Iterator[Metric]:
    for line in COUNTERS.read_text().splitlines():
        if not line.startswith("DCGM_"):
            continue
        name, kind, text = (part.strip() for part in line.split(",", 2))
        metric = Metric(name, text, "unknown" if kind == "counter" else kind)
        for rank in range(ranks):
            labels = {"gpu": str(rank), "UUID": gpu_uuid(rank), "Hostname": "node-0", "modelName": "any"}
            labels |= {"exported_namespace": namespace, "exported_pod": pod}
            metric.add_sample(name, labels, 1.0 + index)
        yield metric


def _alert(namespace: str, job: str) -> Metric:
    """Return the series that Prometheus writes while an alert fires.

    Another test checks that alerts fire when they should.
    """
    metric = Metric("ALERTS", "written by Prometheus", "gauge")
    for name, severity in (("ZeroTrainStraggler", "critical"), ("ZeroTrainOperatorDown", "critical")):
        labels = {"alertname": name, "alertstate": "firing", "severity": severity}
        metric.add_sample("ALERTS", labels | {"namespace": namespace, "job_name": job, "rank": "0"}, 1.0)
    return metric


def _family(spec: MetricSpec, each: Sequence[Mapping[str, str]], index: int, at: float) -> Metric:
    metric = Metric(spec.name.removesuffix("_total").removesuffix("_info"), spec.help, spec.kind.value)
    for common in each:
        own = [label for label in spec.labels if label not in common]
        for values in product(*(spec.labels[label] or OPEN_LABELS[label] for label in own)):
            _add(metric, spec, {**common, **dict(zip(own, values, strict=True))}, index, at)
    return metric


def _add(metric: Metric, spec: MetricSpec, labels: dict[str, str], index: int, at: float) -> None:
    grown = float(index)
    match spec.kind:
        case MetricKind.HISTOGRAM:
            for bound in (*map(str, spec.buckets), "+Inf"):
                metric.add_sample(f"{spec.name}_bucket", {**labels, "le": bound}, grown)
            metric.add_sample(f"{spec.name}_count", labels, grown)
            metric.add_sample(f"{spec.name}_sum", labels, grown / 100)
        case MetricKind.COUNTER:
            metric.add_sample(spec.name, labels, grown)
        case MetricKind.INFO:
            metric.add_sample(spec.name, labels, 1.0)
        case MetricKind.GAUGE:
            metric.add_sample(spec.name, labels, at - 60 if "timestamp" in spec.name else 1.0)
