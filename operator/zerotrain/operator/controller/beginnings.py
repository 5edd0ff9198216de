"""First attempts: the jobs that wait in line for one, and the jobs that start before their status is
written."""

from __future__ import annotations

from zerotrain.operator.api import AttemptShape
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


def begins(job: Json, plan: Plan) -> bool:
    """Return whether the plan starts the first attempt of a job that has no status. Its pods need not wait
    for a status: there is no earlier attempt that a number would distinguish from it, and an operator that
    restarts finds the pods. If more jobs start than statuses can be written, the status is written when all
    pods run."""
    if "status" in job or "elastic" in job["spec"]:  # the size of an elastic job may change meanwhile
        return False
    creates = len(plan.actions) == 1 and isinstance(plan.actions[0], CreateWorkers)
    return creates and pods_to_create(plan) <= LARGE and _follows_from_spec(plan)


def _follows_from_spec(plan: Plan) -> bool:
    """Return whether an operator that finds the pods can tell from the spec how they were made. Contributions
    of a queue, a gang scheduler or the state of the cluster are recorded in the status alone."""
    shape = plan.status.shape if plan.status is not None else None
    if shape is None:
        return False
    own = {"workers", "grace_period_seconds", "generation", "frozen_hash"}
    return shape == AttemptShape.model_validate(shape.model_dump(include=own))
