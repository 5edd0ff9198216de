"""Workers that the scheduler finds no node for, and workers that may still get one."""

from __future__ import annotations

from datetime import datetime, timedelta

from zerotrain.operator.reconcile.attempts import AttemptView, Worker, WorkerState
from zerotrain.operator.reconcile.observe import PodView

SETTLE = timedelta(seconds=10)
"""Time that a scheduler's rejection must have lasted: it considers pods one by one, and again when some are
deleted."""


def refused(view: AttemptView) -> list[PodView]:
    """Return the pods that the scheduler found no node for, not even by preemption; pods behind a gate are
    excluded."""
    return [pod for pod in view.present if pod.refused_seen_at is not None and not pod.ended]


def refused_at(view: AttemptView) -> datetime | None:
    """Return the time from which the lack of a node for some worker is settled; None while no pod is
    rejected."""
    since = min((pod.refused_seen_at for pod in refused(view) if pod.refused_seen_at), default=None)
    return None if since is None else since + SETTLE


def placeable(view: AttemptView) -> int:
    """Return the number of workers that have a node or may still get one.

    Workers that are not created yet are included: it is not the scheduler that prevents them. If the
    scheduler rejects all pods, it does not say how many it would place, so sizes are tried one by one.
    """

    def may_be(worker: Worker) -> bool:
        if worker.pod is None:
            return worker.state is WorkerState.ABSENT
        return worker.pod.refused_seen_at is None

    return sum(1 for worker in view.workers if may_be(worker)) or len(view.workers) - 1
