"""Rejections by the API server, reported to the user: one event when they begin, and the condition Stalled.

The condition is set only if the user must act.
"""

from __future__ import annotations

import re
from typing import Final

from zerotrain.operator.api import Phase
from zerotrain.operator.constants import ConditionType
from zerotrain.operator.reconcile.draft import Draft, stored
from zerotrain.operator.reconcile.observe import Problem

_WAITING: Final = frozenset({None, Phase.QUEUED, Phase.PENDING, Phase.STARTING, Phase.RUNNING})
"""Phases in which a rejected request keeps the job from its work."""

_STOPPED: Final = _WAITING - {Phase.RUNNING} | {Phase.RESTARTING}
"""Phases of these in which the job does not train: a rejection does not stall a job that trains."""


def lasting(draft: Draft) -> Problem | None:
    """Return a rejection that only the user can resolve; None if it may resolve by itself, as an exhausted
    quota may."""
    problem = draft.observed.problem
    if problem is None or not problem.lasting or draft.status.phase not in _STOPPED:
        return None
    return problem


def report(draft: Draft) -> None:
    """Emit one event when a rejection begins."""
    problem = draft.observed.problem
    if problem is None or draft.status.phase not in _WAITING:
        return
    before = {item.type: item for item in draft.job.status.conditions}.get(str(ConditionType.RECONCILING))
    current = (problem.reason, _kind(stored(problem.message)))
    if before is None or (before.reason, _kind(before.message)) != current:
        draft.emit(problem.reason, problem.message, warning=True)


def _kind(text: str) -> str:
    """Return the text without its numbers.

    Which pod is rejected first, and how much of a quota others use, differs from pass to pass.
    """
    return re.sub(r"\d+", "", text)
