"""Privileges of a job's pods beyond Pod Security "restricted", reported in a condition and an event."""

from __future__ import annotations

from typing import Final

from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile.draft import Draft

RDMA: Final = (
    "spec.resources.rdma: the workers ask for the capability IPC_LOCK, so that their pods are not Pod "
    'Security "restricted"; no NetworkPolicy applies to traffic over RDMA'
)


def condition_message(draft: Draft) -> str:
    """Return the text of the condition; empty for a job without extra privileges."""
    resources = draft.job.spec.resources
    return RDMA if resources is not None and resources.rdma is not None else ""


def report(draft: Draft) -> None:
    """Emit one event with the first attempt; resources are immutable, so it is not repeated."""
    if draft.status.attempt == 1 and (text := condition_message(draft)):
        draft.emit(Reason.IPC_LOCK_ADDED, text, warning=True)
