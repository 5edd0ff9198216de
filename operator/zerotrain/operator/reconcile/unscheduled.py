"""Workers that the scheduler finds no node for, beside those that have one."""

from __future__ import annotations

from datetime import datetime, timedelta

from zerotrain.operator.reconcile.attempts import AttemptView, Fate, Worker
from zerotrain.operator.reconcile.observe import PodView

SETTLE = timedelta(seconds=10)
"""So long a refusal of the scheduler must have stood: it looks at pods one by one, and again when some go."""


def refused(view: AttemptView) -> list[PodView]:
    """Pods that the scheduler has looked at and found no node for, also none to make free by preemption; not
    those behind a gate."""
    return [pod for pod in view.present if pod.refused_seen_at is not None and not pod.ended]


def refused_at(view: AttemptView) -> datetime | None:
    """From when on it stands that there is no node for some worker; None while nobody says so."""
    since = min((pod.refused_seen_at for pod in refused(view) if pod.refused_seen_at), default=None)
    return None if since is None else since + SETTLE


def placeable(view: AttemptView) -> int:
    """Workers that have a node or may get one still. So may those that are not made yet: whatever keeps them
    from it, it is not the scheduler. Where it refuses every one, it does not say how many it would place:
    sizes are tried one by one."""

    def may_be(worker: Worker) -> bool:
        if worker.pod is None:
            return worker.fate is Fate.ABSENT
        return worker.pod.refused_seen_at is None

    return sum(1 for worker in view.workers if may_be(worker)) or len(view.workers) - 1
