"""The decisions of the operator, pure: `reconcile(job, observed, now) -> Plan`."""

from .core import reconcile
from .observe import Observed, PodState, PodView, Problem, YieldState, job_uid_of, pod_view
from .plan import (
    NOTHING,
    Action,
    CreateVerification,
    CreateWorkers,
    DeleteJob,
    DeletePods,
    DeleteWorkers,
    Event,
    EventType,
    Plan,
    RequestYield,
)

__all__ = [
    "NOTHING",
    "Action",
    "CreateVerification",
    "CreateWorkers",
    "DeleteJob",
    "DeletePods",
    "DeleteWorkers",
    "Event",
    "EventType",
    "Observed",
    "Plan",
    "PodState",
    "PodView",
    "Problem",
    "RequestYield",
    "YieldState",
    "job_uid_of",
    "pod_view",
    "reconcile",
]
