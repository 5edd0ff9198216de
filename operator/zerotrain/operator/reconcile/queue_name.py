"""The Kueue queue of a job: `spec.scheduling.queueName`, or the label that Kueue's own jobs use.

The schema lets the field change only while the job is suspended, but its rules do not cover labels. So an
active job keeps the queue that its label named at the start, in status, until it is suspended.
"""

from __future__ import annotations

import re

from zerotrain.operator.api import Phase
from zerotrain.operator.api.base import DNS_LABEL
from zerotrain.operator.constants import QUEUE_LABEL, Reason
from zerotrain.operator.reconcile.draft import Draft

_AT_REST = frozenset({Phase.SUSPENDED, Phase.STALLED})
_ON_ITS_WAY = frozenset(
    {Phase.PENDING, Phase.STARTING, Phase.RUNNING, Phase.RESTARTING, Phase.YIELDING, Phase.SUSPENDING}
)
"""Phases in which a changed label takes effect at the next suspension."""

_DNS_LABEL = re.compile(DNS_LABEL)
_MAX_NAME_CHARS = 63


def queue_name(draft: Draft) -> str | None:
    """Return the name of the queue that admits the job; None without one."""
    return _field(draft) or draft.status.queue_name


def take_label(draft: Draft) -> None:
    """Store the queue that the label names, at the start of a pass.

    A job that has not begun, or is suspended, takes the label's queue. For an active job the change is stored
    for later and reported once.
    """
    label, field, status = _label(draft), _field(draft), draft.status
    if status.attempt == 0 or status.phase in _AT_REST:
        taken = None if field is not None else label
        if (status.queue_name, status.next_queue_name) != (taken, None):
            draft.set(queue_name=taken, next_queue_name=None)
        return
    if status.phase not in _ON_ITS_WAY:
        return
    now = queue_name(draft)
    asked = label or ("" if field is None else field)
    changed = None if asked == (now or "") else asked
    if changed == status.next_queue_name:
        return
    draft.set(next_queue_name=changed)
    if changed is not None:
        draft.emit(
            Reason.QUEUE_CHANGED,
            f"label {QUEUE_LABEL}: {_shown(changed)} counts from the next suspension of the job; until then "
            f"it is in {_shown(now or '')}",
        )


def refusal(draft: Draft) -> tuple[str, str] | None:
    """Return reason and message if no attempt may start; None if label and field agree.

    A change that waits for a suspension is no disagreement.
    """
    label, field = _label(draft), _field(draft)
    if label is None or draft.status.next_queue_name is not None:
        return None
    if field is not None and field != label:
        return (
            Reason.INVALID_SPEC,
            f"spec.scheduling.queueName is {field!r} and label {QUEUE_LABEL} is {label!r}: both name the "
            "job's queue, so they must be equal; remove one of them",
        )
    if not _DNS_LABEL.fullmatch(label) or len(label) > _MAX_NAME_CHARS:
        return (
            Reason.INVALID_SPEC,
            f"label {QUEUE_LABEL} is {label!r}, which no LocalQueue can be called; give lower-case letters, "
            "digits and dashes",
        )
    return None


def _field(draft: Draft) -> str | None:
    scheduling = draft.job.spec.scheduling
    return None if scheduling is None else scheduling.queue_name


def _label(draft: Draft) -> str | None:
    return draft.job.identity.queue_label or None


def _shown(name: str) -> str:
    return f"queue {name}" if name else "no queue"
