"""First attempts: which jobs stand in line for one, and which begin before their status is written."""

from __future__ import annotations

from zerotrain.operator.api import AttemptShape
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.handlers.starts import LARGE
from zerotrain.operator.reconcile import CreateWorkers, Observed, Plan


def is_new(job: Json) -> bool:
    """A job that no pass has seen and that is small enough for the line: what it wants is to start."""
    workers = job.get("spec", {}).get("workers")
    return "status" not in job and (not isinstance(workers, int) or workers <= LARGE)


def pods_to_create(plan: Plan) -> int:
    """Gates stand in no line: their pods hold room and quota, and behind all that still create they would
    hold it for minutes."""
    return sum(len(action.indices) for action in plan.actions if isinstance(action, CreateWorkers))


def has_begun(plan: Plan, observed: Observed) -> bool:
    """Whether some pods of the attempt that the plan creates for exist: they hold nodes, so the others come
    before those of jobs that have none."""
    attempts = {action.attempt for action in plan.actions if isinstance(action, CreateWorkers)}
    return any(pod.attempt in attempts for pod in observed.pods)


def begins(job: Json, plan: Plan) -> bool:
    """Whether the plan is to start the first attempt of a job that has no status. Its pods do not wait for
    one: there is no earlier attempt that a number would tell from it, and an operator that starts again finds
    the pods. Where more jobs start than can be written of at once, the status comes with the news that all
    pods run."""
    if "status" in job or "elastic" in job["spec"]:  # of an elastic job the size may change meanwhile
        return False
    creates = len(plan.actions) == 1 and isinstance(plan.actions[0], CreateWorkers)
    return creates and pods_to_create(plan) <= LARGE and _follows_from_spec(plan)


def _follows_from_spec(plan: Plan) -> bool:
    """Whether whoever finds the pods can tell how they were made. What a queue, a gang scheduler or the state
    of the cluster had a part in stands in the status alone."""
    shape = plan.status.shape if plan.status is not None else None
    if shape is None:
        return False
    own = {"workers", "grace_period_seconds", "generation", "frozen_hash"}
    return shape == AttemptShape.model_validate(shape.model_dump(include=own))
