"""What the API server refuses to make for a job, said where people look: one event when it begins, and the
condition Stalled where only people can change it."""

from __future__ import annotations

import re
from typing import Final

from zerotrain.operator.api import Phase
from zerotrain.operator.constants import ConditionType
from zerotrain.operator.reconcile.draft import Draft, stored
from zerotrain.operator.reconcile.observe import Problem

_WAITING: Final = frozenset({None, Phase.QUEUED, Phase.PENDING, Phase.STARTING, Phase.RUNNING})
"""Phases in which something is wanted of the API server that keeps the job from its work."""

_STOPPED: Final = _WAITING - {Phase.RUNNING} | {Phase.RESTARTING}
"""Those in which the job does not train: one that does is not stalled by what it is refused beside."""


def lasting(draft: Draft) -> Problem | None:
    """A refusal that only people can change; None where it may pass by itself, as a quota that is used up."""
    problem = draft.observed.problem
    if problem is None or not problem.lasting or draft.status.phase not in _STOPPED:
        return None
    return problem


def tell(draft: Draft) -> None:
    """In one event, when it begins."""
    problem = draft.observed.problem
    if problem is None or draft.status.phase not in _WAITING:
        return
    before = {item.type: item for item in draft.job.status.conditions}.get(str(ConditionType.RECONCILING))
    told = (problem.reason, _kind(stored(problem.message)))
    if before is None or (before.reason, _kind(before.message)) != told:
        draft.emit(problem.reason, problem.message, warning=True)


def _kind(text: str) -> str:
    """The text without its numbers: which pod is refused first, and what of a quota others use, differs from
    pass to pass."""
    return re.sub(r"\d+", "", text)
