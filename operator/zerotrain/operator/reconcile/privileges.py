"""What a job's pods ask for beyond Pod Security "restricted", said where people look; and its refusal."""

from __future__ import annotations

from typing import Final

from zerotrain.operator.api import Phase
from zerotrain.operator.api.status import ConditionStatus
from zerotrain.operator.constants import ConditionType, Reason
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.observe import Problem

RDMA: Final = (
    "spec.resources.rdma: the workers ask for the capability IPC_LOCK, so that their pods are not Pod "
    'Security "restricted"; no NetworkPolicy binds what goes over RDMA'
)

_OVER: Final = frozenset({Phase.COMPLETED, Phase.FAILED, Phase.SUSPENDED})


def told(draft: Draft) -> str:
    """For a condition that lasts; empty for a job that asks for nothing."""
    resources = draft.job.spec.resources
    return RDMA if resources is not None and resources.rdma is not None else ""


def tell(draft: Draft) -> None:
    """In one event, with the first attempt: resources are immutable."""
    if draft.status.attempt == 1 and (text := told(draft)):
        draft.emit(Reason.IPC_LOCK_ADDED, text, warning=True)


def refusal(draft: Draft) -> Problem | None:
    """The namespace does not let the pods in, which only people can change."""
    problem = draft.observed.problem
    if problem is None or problem.reason != Reason.POD_SECURITY or draft.status.phase in _OVER:
        return None
    return problem


def tell_refusal(draft: Draft) -> None:
    """In one event, when it begins."""
    problem = refusal(draft)
    if problem is None:
        return
    before = {item.type: item for item in draft.job.status.conditions}.get(str(ConditionType.STALLED))
    if before is None or (before.status, before.reason) != (ConditionStatus.TRUE, problem.reason):
        draft.emit(problem.reason, problem.message, warning=True)
