"""What a pass asks of the start queue: whether its job is new, and which pods it creates."""

from __future__ import annotations

from zerotrain.operator.cluster.api import Json
from zerotrain.operator.controller.starts import LARGE
from zerotrain.operator.reconcile import CreateWorkers, Observed, Plan


def is_new(job: Json) -> bool:
    """Return whether no pass has seen the job, and it is small enough for the line of small jobs: such a job
    wants to start."""
    workers = job.get("spec", {}).get("workers")
    return "status" not in job and (not isinstance(workers, int) or workers <= LARGE)


def pods_to_create(plan: Plan) -> int:
    """Return the number of workers that the plan creates. Opening scheduling gates does not count and waits
    in no line: the pods behind them hold capacity and quota, and would hold it for minutes behind all jobs
    that still create pods."""
    return sum(len(action.indices) for action in plan.actions if isinstance(action, CreateWorkers))


def has_begun(plan: Plan, observed: Observed) -> bool:
    """Return whether some pods exist of the attempt that the plan creates pods for. They hold nodes, so the
    remaining pods come before those of jobs that have none."""
    attempts = {action.attempt for action in plan.actions if isinstance(action, CreateWorkers)}
    return any(pod.attempt in attempts for pod in observed.pods)
