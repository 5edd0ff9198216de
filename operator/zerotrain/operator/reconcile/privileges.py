"""What a job's pods ask for beyond Pod Security "restricted", said where people look."""

from __future__ import annotations

from typing import Final

from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile.draft import Draft

RDMA: Final = (
    "spec.resources.rdma: the workers ask for the capability IPC_LOCK, so that their pods are not Pod "
    'Security "restricted"; no NetworkPolicy binds what goes over RDMA'
)


def told(draft: Draft) -> str:
    """For a condition that lasts; empty for a job that asks for nothing."""
    resources = draft.job.spec.resources
    return RDMA if resources is not None and resources.rdma is not None else ""


def tell(draft: Draft) -> None:
    """In one event, with the first attempt: resources are immutable."""
    if draft.status.attempt == 1 and (text := told(draft)):
        draft.emit(Reason.IPC_LOCK_ADDED, text, warning=True)
