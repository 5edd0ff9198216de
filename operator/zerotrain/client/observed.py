"""Objects around a job in the cluster as records: events, pods, log lines, reports, metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self

from zerotrain.client.lenient_json import Fields
from zerotrain.contract.progress import Progress
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.constants import CONTAINER_NAME, LABEL_ATTEMPT, LABEL_HELPER, LABEL_RANK


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Kubernetes event about a job or one of its pods."""

    time: datetime | None
    type: str
    """Normal or Warning."""
    reason: str
    message: str
    count: int
    source: str
    kind: str
    name: str
    """Name of the object that it is about."""

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """Make the record from an event of core/v1, the form in which the API server also shows those of
        events.k8s.io."""
        event = Fields(raw)
        series, about = event.part("series"), event.part("involvedObject")
        times = (
            series.moment("lastObservedTime"),
            event.moment("lastTimestamp"),
            event.moment("eventTime"),
            event.part("metadata").moment("creationTimestamp"),
        )
        return cls(
            time=next((time for time in times if time is not None), None),
            type=event.text("type"),
            reason=event.text("reason"),
            message=event.text("message"),
            count=series.whole("count") or event.whole("count") or 1,
            source=event.text("reportingComponent") or event.part("source").text("component"),
            kind=about.text("kind"),
            name=about.text("name"),
        )

    @property
    def is_warning(self) -> bool:
        return self.type == "Warning"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """Worker of the job, or a helper pod such as the one that verifies its last checkpoint."""

    name: str
    namespace: str
    attempt: int
    worker: int | None
    """Index of the worker, 0-based; None for a helper."""
    helper: str
    phase: str
    node: str
    ready: bool
    started: bool
    """Whether its container ever ran: only then is there a log."""
    exit_code: int | None
    reason: str
    """Reason why it waits or how it ended: ImagePullBackOff, OOMKilled, Evicted and so on."""
    message: str
    deleting: bool
    finalizers: tuple[str, ...]
    """Finalizers that block its deletion."""
    created: datetime | None
    container: str
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        pod = Fields(raw)
        meta, status = pod.part("metadata"), pod.part("status")
        labels = meta.pairs("labels")
        container = _container(pod)
        state = container.part("state")
        ended, waiting = state.part("terminated"), state.part("waiting")
        unplaced = _condition(status, "PodScheduled")
        unplaced = unplaced if unplaced.text("status") == "False" else Fields(None)
        sources = (waiting, ended, status, unplaced)
        return cls(
            name=meta.text("name"),
            namespace=meta.text("namespace"),
            attempt=_index(labels.get(LABEL_ATTEMPT)) or 0,
            worker=_index(labels.get(LABEL_RANK)),
            helper=labels.get(LABEL_HELPER, ""),
            phase=status.text("phase"),
            node=pod.part("spec").text("nodeName"),
            ready=_condition(status, "Ready").text("status") == "True",
            started=bool(state.part("running") or ended),
            exit_code=ended.whole("exitCode"),
            reason=next((part.text("reason") for part in sources if part.text("reason")), ""),
            message=next((part.text("message") for part in sources if part.text("reason")), ""),
            deleting=bool(meta.text("deletionTimestamp")),
            finalizers=meta.texts("finalizers"),
            created=meta.moment("creationTimestamp"),
            container=container.text("name") or labels.get(LABEL_HELPER) or CONTAINER_NAME,
            raw=raw,
        )

    @property
    def is_running(self) -> bool:
        """Return whether it can be called over HTTP."""
        return self.phase == "Running" and self.started and self.exit_code is None and not self.deleting


def _container(pod: Fields) -> Fields:
    """Return the status of the launcher's container; of the only one in a helper."""
    found = pod.part("status").parts("containerStatuses")
    worker = next((item for item in found if item.text("name") == CONTAINER_NAME), None)
    return worker or (found[0] if found else Fields(None))


def _condition(status: Fields, kind: str) -> Fields:
    return next((item for item in status.parts("conditions") if item.text("type") == kind), Fields(None))


def _index(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """One line exactly as a rank wrote it: print it through `text.printable`."""

    attempt: int
    pod: str
    worker: int
    rank: int | None
    """Rank that wrote the line; None for the launcher's own lines, and where the rank is unknown."""
    text: str
    """Text without the launcher's prefix and the end of the line."""
    time: datetime | None = None
    """Time at which its node received it; None where it is unknown."""
    kept: bool = False
    """Whether the operator kept it of a failure; the pod is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobProgress:
    """Reports of a job's workers at one moment."""

    reports: Mapping[str, WorkerReport]
    """Reports by pod."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Running pods that did not answer, and why."""

    @property
    def ranks(self) -> tuple[Progress, ...]:
        """Return the records of all ranks that were reported, in rank order."""
        found = [rank for report in self.reports.values() for rank in report.ranks]
        return tuple(sorted(found, key=lambda rank: rank.rank))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One value of a metric."""

    name: str
    """Name with its suffix: _bucket, _sum, _count, _total, _info."""
    labels: Mapping[str, str]
    """Labels of the exporter, and `pod`."""
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricFamily:
    """One metric of all workers that answered."""

    name: str
    type: str
    help: str
    samples: tuple[Sample, ...]

    def value(self, **labels: str) -> float | None:
        """Return the value of the first sample with these labels, or None."""
        for sample in self.samples:
            if all(sample.labels.get(name) == text for name, text in labels.items()):
                return sample.value
        return None
