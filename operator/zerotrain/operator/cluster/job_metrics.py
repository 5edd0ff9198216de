"""State of every job as time series, made at a scrape from the jobs in memory; `Telemetry` registers the
collector.

Only the leader exports them, or a job's series would exist twice. An object that cannot be read costs its own
series alone: any user who may write a status may write nonsense into it.

A scrape with more samples than its limit is dropped as a whole: one tenant with thousands of jobs would
remove the series of all others. So each namespace has a share, all of them together have a limit, and the
jobs without series are counted by namespace and phase.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from zerotrain.contract.metrics import JOB_METRICS, OPERATOR_METRICS
from zerotrain.contract.metrics.operator import HANG_PHASES, JOB_PHASES, RESTART_CAUSES
from zerotrain.contract.metrics.sizing import (
    MAX_EXPORTED_JOBS,
    MAX_EXPORTED_JOBS_OF_NAMESPACE,
    MAX_FAILURE_KINDS,
    MAX_NAMED_NAMESPACES,
    samples_of_a_job,
)
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.reconcile.hangs import DEFAULT_FACTOR, MAX_LIMIT_S, HangLimits
from zerotrain.operator.reconcile.pod_reader import parse_time

log = logging.getLogger(__name__)

Value = tuple[str, Mapping[str, str], float]
"""Family, labels beside namespace and job_name, value."""

EXCEPTIONS = (
    "SpillIOError",
    "SpillIntegrityError",
    "SpillDoesNotFit",
    "CheckpointNoSpace",
    "CheckpointNotWritable",
    "CheckpointFenced",
    "CheckpointDamaged",
    "CheckpointError",
    "Diverged",
    "CommError",
)
"""Names of zerotrain's own exceptions that a failure's message may contain. Other names come from the
tenant's program, and their number is unbounded."""

_EXCEPTION = re.compile(rf"\b({'|'.join(EXCEPTIONS)}):")
_RUNNING = ("Starting", "Running")
"""Phases in which a rank can hang: a job that has ended, waits or is suspended has no such rank."""
_NONE: Mapping[str, str] = {}
_WITHOUT_SERIES = next(
    spec for spec in OPERATOR_METRICS if spec.name == "zerotrain_operator_jobs_without_series"
)
_SINCE = {
    "Suspended": ("Suspended",),
    "Running": ("Progressing", "RendezvousComplete"),
    "Starting": ("PodsScheduled",),
    "Queued": ("Admitted",),
    "Stalled": ("Stalled",),
}
"""Conditions by phase; the last transition of the first one that is present began the phase."""


Job = tuple[JobKey, Json]

OTHER = "other"
"""Phase label of jobs whose phase is none of JOB_PHASES."""

_IDLE = frozenset({"Suspended", "Stalled"})

_ENDED = frozenset({"Completed", "Failed"})


class JobCollector(Collector):
    """Collector of the families of JOB_METRICS. `collect` may be called from any thread."""

    def __init__(self, jobs: Iterable[tuple[JobKey, Json]], leads: Callable[[], bool]) -> None:
        """`jobs` returns the newest bodies each time it is iterated over."""
        self._jobs, self._leads = jobs, leads
        self._kept: dict[JobKey, tuple[str, list[Sample]]] = {}
        """Version of each job and its samples: most jobs have not changed since the last scrape."""

    def collect(self) -> Iterator[Metric]:
        families = {
            spec.name: Metric(
                spec.name.removesuffix("_total").removesuffix("_info"), spec.help, spec.kind.value
            )
            for spec in JOB_METRICS
        }
        kept = {}
        chosen = choose(self._jobs if self._leads() else ())
        for key, job in chosen.jobs:
            version = f"{job['metadata']['uid']} {job['metadata']['resourceVersion']}"
            known, samples = self._kept.get(key, ("", []))
            if known != version:
                samples = _samples(key, job)
            kept[key] = version, samples
            for sample in samples:
                families[sample.name].samples.append(sample)
        self._kept = kept
        return iter((*families.values(), _left_out(chosen)))


def _left_out(chosen: Chosen) -> Metric:
    found = Metric(_WITHOUT_SERIES.name, _WITHOUT_SERIES.help, _WITHOUT_SERIES.kind.value)
    none = {("", OTHER): 0}
    for (namespace, phase), count in (chosen.left_out or none).items():
        found.add_sample(found.name, {"job_namespace": namespace, "phase": phase}, count)
    return found


def _samples(key: JobKey, job: Json) -> list[Sample]:
    labels = {"namespace": key.namespace, "job_name": key.name}
    try:
        values = islice(values_of(job), samples_of_a_job())
        return [Sample(name, {**labels, **own}, number) for name, own, number in values]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        log.warning("%s: no metrics, as its status cannot be read: %r", key, error)
        return []


def values_of(job: Json) -> Iterator[Value]:
    """Iterate over all series of one job. Raises ValueError, TypeError, AttributeError or KeyError on a
    malformed status."""
    spec, status = job["spec"], job.get("status") or {}
    phase = str(status.get("phase") or "Pending")
    stage = status.get("zeroStage")
    facts = {
        "zero_stage": "" if stage is None else str(int(stage)),
        "queue": str((spec.get("scheduling") or {}).get("queueName") or status.get("queueName") or ""),
    }
    yield "zerotrain_job_info", facts, 1.0
    yield "zerotrain_job_phase", {"phase": phase}, 1.0
    yield from _moments(job, status, phase)
    yield "zerotrain_job_attempt", _NONE, float(status.get("attempt", 0))
    for what in ("workers", "ranks"):
        count = status.get(what) or {}
        yield f"zerotrain_job_{what}", _NONE, float(count.get("desired", 0))
        yield f"zerotrain_job_{what}_ready", _NONE, float(count.get("ready", 0))
    restarts = status.get("restarts") or {}
    for cause in RESTART_CAUSES:
        yield "zerotrain_job_restarts_total", {"cause": cause}, float(restarts.get(cause, 0))
    progress = status.get("progress") or {}
    yield "zerotrain_job_step", _NONE, float(progress.get("step", 0))
    yield "zerotrain_job_total_steps", _NONE, float(progress.get("totalSteps", 0))
    yield from _checkpoint(status.get("checkpoint") or {})
    hung = phase in _RUNNING and _of_this_attempt(status, "hang") is not None
    yield "zerotrain_job_hung", _NONE, float(hung)
    limits = HangLimits.read(spec.get("hangPolicy"))
    step_s = max(limits.min_s, _patient_s(limits, progress))
    allowed_s = (max(limits.startup_s, limits.first_step_s), step_s, limits.checkpoint_s)
    for stretch, limit_s in zip(HANG_PHASES, allowed_s, strict=True):
        yield "zerotrain_job_hang_limit_seconds", {"phase": stretch}, limit_s
    straggler = _of_this_attempt(status, "straggler")
    if phase == "Running" and straggler is not None:
        ratio = int(straggler.get("percent", 0)) / 100
        yield "zerotrain_job_straggler_ratio", {"rank": str(int(straggler["rank"]))}, ratio
    yield from _failures(status)
    for tier in ("gpu", "host", "pinned", "nvme"):
        planned = (status.get("memoryPlan") or {}).get(f"{tier}Bytes")
        if planned is not None:
            yield "zerotrain_job_planned_memory_bytes", {"tier": tier}, float(planned)


def _patient_s(limits: HangLimits, progress: Json) -> float:
    """Return the step limit of a stepTimeoutFactor above the default; 0 otherwise, since the alert rules know
    the default."""
    if limits.factor <= DEFAULT_FACTOR:
        return 0.0
    return min(limits.factor * float(progress.get("stepSeconds") or 0.0), MAX_LIMIT_S)


def _of_this_attempt(status: Json, finding: str) -> Json | None:
    """Return the finding if it belongs to the present attempt. It stays in the status for users until the
    next attempt; for alerts it ends with its own."""
    found: Json | None = status.get(finding)
    return found if found is not None and found.get("attempt") == status.get("attempt") else None


def _moments(job: Json, status: Json, phase: str) -> Iterator[Value]:
    moments = {
        "created": job["metadata"].get("creationTimestamp"),
        "start": status.get("startTime"),
        "completion": status.get("completionTime"),
        "attempt_start": status.get("attemptStartTime"),
        "last_step": (status.get("progress") or {}).get("lastStepTime"),
        "phase_since": phase_since(job, status, phase),
    }
    for name, text in moments.items():
        if (unix_s := _unix(text)) is not None:
            yield f"zerotrain_job_{name}_timestamp_seconds", _NONE, unix_s


def phase_since(job: Json, status: Json, phase: str) -> str | None:
    """Return the time at which the phase began, as far as the status shows; it survives a restart of the
    operator."""
    changes = {item["type"]: item.get("lastTransitionTime") for item in status.get("conditions") or ()}
    if phase in ("Completed", "Failed"):
        began = status.get("completionTime")
    elif phase == "Pending":
        began = status.get("attemptStartTime")
    elif phase == "Restarting":
        began = next((item.get("time") for item in status.get("failures") or ()), None)
    elif phase in ("Yielding", "Suspending"):
        asked = (status.get("yieldRequest") or {}).get("requestedAt")
        began = asked or (status.get("checkpoint") or {}).get("requestedAt")
    else:
        began = next((changes[name] for name in _SINCE.get(phase, ()) if changes.get(name)), None)
    newest = max(filter(None, changes.values()), default=None)
    found = began or newest or job["metadata"].get("creationTimestamp")
    return None if found is None else str(found)


def _checkpoint(checkpoint: Json) -> Iterator[Value]:
    last, verification = checkpoint.get("last"), checkpoint.get("verification") or {}
    is_damaged = verification.get("state") == "Damaged"
    yield "zerotrain_job_checkpoint_verification_failed", _NONE, float(is_damaged)
    if last is not None:
        yield "zerotrain_job_last_checkpoint_step", _NONE, float(last["step"])
        if (unix_s := _unix(last.get("time"))) is not None:
            yield "zerotrain_job_last_checkpoint_timestamp_seconds", _NONE, unix_s


def _failures(status: Json) -> Iterator[Value]:
    """Iterate over the newest failure of each kind, at most MAX_FAILURE_KINDS."""
    newest: dict[tuple[str, str, str], float] = {}
    for item in status.get("failures") or ():
        code, unix_s = item.get("exitCode"), _unix(item.get("time"))
        found = _EXCEPTION.search(str(item.get("message") or ""))
        kind = (
            str(item.get("reason") or "")[:64],
            "" if code is None else str(int(code)),
            "" if found is None else found.group(1),
        )
        if unix_s is not None:
            newest[kind] = max(newest.get(kind, 0.0), unix_s)
    last = sorted(newest.items(), key=lambda item: -item[1])[:MAX_FAILURE_KINDS]
    for (reason, exit_code, exception), unix_s in last:
        labels = {"reason": reason, "exit_code": exit_code, "exception": exception}
        yield "zerotrain_job_failure_timestamp_seconds", labels, unix_s


def _unix(text: str | None) -> float | None:
    moment = parse_time(text)
    return None if moment is None else moment.timestamp()


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """Jobs as a scrape exports them."""

    jobs: tuple[Job, ...]
    """Jobs with series of their own."""
    left_out: Mapping[tuple[str, str], int]
    """Number of the other jobs, by namespace ("" = further ones together) and phase."""


def choose(
    jobs: Iterable[Job],
    *,
    overall: int = MAX_EXPORTED_JOBS,
    of_namespace: int = MAX_EXPORTED_JOBS_OF_NAMESPACE,
) -> Chosen:
    """Choose the jobs of every namespace, with equal shares where not all fit. Within a namespace, active
    jobs come before idle ones, and those before ended ones, each group with the newest first."""
    by_namespace: dict[str, list[Job]] = {}
    for key, job in jobs:
        by_namespace.setdefault(key.namespace, []).append((key, job))
    share = min(of_namespace, _share([len(own) for own in by_namespace.values()], overall))
    kept: list[Job] = []
    left: dict[str, list[Job]] = {}
    for namespace, own in by_namespace.items():
        if len(own) > share:
            own = sorted(own, key=_worth, reverse=True)
            left[namespace] = own[share:]
        kept += own[:share]
    return Chosen(jobs=tuple(kept), left_out=_counted(left))


def _share(sizes: Sequence[int], overall: int) -> int:
    """Return the largest share of one namespace with which all shares together stay within the limit."""
    remaining, share = overall, overall
    for index, size in enumerate(sorted(sizes)):
        share = remaining // (len(sizes) - index)
        if size > share:
            return share
        remaining -= size
    return overall


def _worth(item: Job) -> tuple[int, str, str]:
    key, job = item
    phase = _phase(job)
    rank = 0 if phase in _ENDED else 1 if phase in _IDLE else 2
    return rank, str(job["metadata"].get("creationTimestamp") or ""), key.name


def _phase(job: Json) -> str:
    status = job.get("status")
    return str(status.get("phase") or "Pending") if isinstance(status, dict) else "Pending"


def _counted(left: Mapping[str, Sequence[Job]]) -> dict[tuple[str, str], int]:
    named = sorted(left, key=lambda namespace: (-len(left[namespace]), namespace))[:MAX_NAMED_NAMESPACES]
    counts: Counter[tuple[str, str]] = Counter()
    for namespace, jobs in left.items():
        for _, job in jobs:
            phase = _phase(job)
            counts[namespace if namespace in named else "", phase if phase in JOB_PHASES else OTHER] += 1
    return dict(counts)
