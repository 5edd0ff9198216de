"""Detection of slow ranks (stragglers), from what rank 0 computes out of the numbers of every step.

An alarm ends at a lower value than it begins, so that it does not flap for a rank at the threshold.
"""

from __future__ import annotations

import math
from enum import Enum

from zerotrain.contract.progress import Progress
from zerotrain.operator.api import StragglerStatus
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile.attempts import AttemptView
from zerotrain.operator.reconcile.draft import Draft

DEFAULT_PERCENT = 150
KEPT_SHARE = 0.5
"""Fraction of the threshold's excess below which a rank is no longer a straggler."""

MUCH_WORSE = 2.0
"""Factor on the excess of the named rank from which another rank replaces it."""

MIN_LOSS = 0.1
"""Minimum excess as a fraction of the whole step; a smaller one does not slow the job down."""


def report(draft: Draft, view: AttemptView) -> None:
    """Update status.straggler, and emit an event that names rank and node, once per attempt and rank."""
    progress = draft.progress
    if progress is None or progress.straggler is None:
        return
    reported, known = progress.straggler, draft.status.straggler
    policy = draft.job.spec.hang_policy
    limit = (policy.straggler_percent if policy is not None else None) or DEFAULT_PERCENT
    percent, level = _percent(progress), level_of(progress, limit)
    if percent is None or level is None:
        return
    if level is Level.LOW and known is not None:
        draft.set(straggler=None)
        draft.emit(
            Reason.STRAGGLER_RECOVERED, f"attempt {view.number}: no rank slows down the others any more"
        )
    # With several slow ranks, the slowest differs from report to report: the first that was named stands for
    # all of them, until another is far worse.
    worse = known is None or (
        known.rank != reported.rank and percent - 100 >= MUCH_WORSE * (known.percent - 100)
    )
    if level is Level.HIGH and worse and _is_rank(draft, reported.rank):
        _raise_alarm(draft, view, rank=reported.rank, percent=percent, limit=limit)


class Level(Enum):
    """The level of the slowest rank in a report; only a change of it is reported."""

    LOW = "low"
    """Ends an alarm."""
    BETWEEN = "between"
    HIGH = "high"
    """Raises an alarm."""


def level_of(progress: Progress, limit: int) -> Level | None:
    """Return the level of a report; None for a report without a straggler, or with impossible numbers."""
    percent = _percent(progress)
    if percent is None:
        return None
    if percent >= limit:
        return Level.HIGH
    return Level.LOW if percent < 100 + (limit - 100) * KEPT_SHARE else Level.BETWEEN


def _percent(progress: Progress) -> int | None:
    """Return the slowest rank's own time in percent of the median rank's; None for impossible numbers."""
    straggler, step_s = progress.straggler, progress.step_seconds
    if straggler is None:
        return None
    own, median = straggler.own_seconds, straggler.median_seconds
    if not (math.isfinite(own) and math.isfinite(median)) or median <= 0 or own < median:
        return None
    if step_s is not None and math.isfinite(step_s) and own - median < MIN_LOSS * step_s:
        return 100
    return int(min(own / median, 1e6) * 100)


def _is_rank(draft: Draft, rank: int) -> bool:
    return 0 <= rank < draft.workers * draft.job.spec.num_ranks_per_worker


def _raise_alarm(draft: Draft, view: AttemptView, *, rank: int, percent: int, limit: int) -> None:
    worker = rank // draft.job.spec.num_ranks_per_worker
    pod = next((item for item in view.present if item.index == worker), None)
    name, node = (pod.name, pod.node or "") if pod is not None else ("", "")
    draft.set(straggler=StragglerStatus(attempt=view.number, rank=rank, pod=name, node=node, percent=percent))
    draft.emit(
        Reason.STRAGGLER,
        f"attempt {view.number}: rank {rank} (pod {name}, node {node or 'unknown'}) slows down all ranks: "
        f"its own work in a step takes more than {limit} % of what the median rank needs",
        warning=True,
    )
