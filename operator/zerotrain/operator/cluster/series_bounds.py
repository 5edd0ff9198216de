"""Choice of the jobs that have time series of their own where there are more than a scrape may hold.

A scrape with more samples than its limit is dropped as a whole: one tenant with thousands of jobs would
remove the series of all others. So each namespace has a share, all of them together have a limit, and the
jobs that do not fit are counted by namespace and phase instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zerotrain.contract.metrics.operator import JOB_PHASES
from zerotrain.contract.metrics.sizing import (
    MAX_EXPORTED_JOBS,
    MAX_EXPORTED_JOBS_OF_NAMESPACE,
    MAX_NAMED_NAMESPACES,
)
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.store import JobKey

Job = tuple[JobKey, Json]

OTHER = "other"
"""Phase label of jobs whose phase is none of JOB_PHASES."""

_IDLE = frozenset({"Suspended", "Stalled"})
_ENDED = frozenset({"Completed", "Failed"})


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
