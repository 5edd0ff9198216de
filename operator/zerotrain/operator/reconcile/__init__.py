"""The decisions of the operator, pure: `reconcile(job, observed, now) -> Plan`."""

from .core import reconcile
from .job import Known
from .capacity import Claim, Demand, NodeUse, Verdict, admit
from .observe import Observed, PodState, PodView, Problem, StacksView, YieldState, job_uid_of, pod_view
from .plan import (
    NOTHING,
    Action,
    CollectStacks,
    CreateVerification,
    CreateWorkers,
    DeleteJob,
    DeletePods,
    DeleteWorkers,
    Event,
    EventType,
    Plan,
    RequestYield,
    StackSource,
)
from .writes import can_wait

__all__ = [
    "NOTHING",
    "Action",
    "CollectStacks",
    "CreateVerification",
    "CreateWorkers",
    "DeleteJob",
    "DeletePods",
    "DeleteWorkers",
    "Event",
    "EventType",
    "Known",
    "Observed",
    "Plan",
    "PodState",
    "PodView",
    "Problem",
    "RequestYield",
    "StackSource",
    "StacksView",
    "YieldState",
    "can_wait",
    "job_uid_of",
    "pod_view",
    "reconcile",
]
