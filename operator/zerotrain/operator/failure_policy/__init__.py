"""The failure policy: the meaning of a worker's end, the user's rules on it, and the decision on a restart.

All functions are pure. `reconcile` calls them for jobs in the cluster, `zerotrain run` for jobs on this
machine.
"""

from .budgets import MAX_HOLD_OFF_S, Budget, Decision, PastRestart, decide, still_counts
from .judgements import (
    ABORTED,
    ABOUT_FILES,
    BY_KUBELET,
    HUNG,
    NOT_STARTED,
    UNKNOWN_ENDS,
    Evidence,
    Judgement,
    Verdict,
    WorkerEnd,
    blames_a_peer,
    judge,
)
from .rules import FailureFacts, Ruling, ruling_of

__all__ = [
    "ABORTED",
    "ABOUT_FILES",
    "BY_KUBELET",
    "HUNG",
    "MAX_HOLD_OFF_S",
    "NOT_STARTED",
    "UNKNOWN_ENDS",
    "Budget",
    "Decision",
    "Evidence",
    "FailureFacts",
    "Judgement",
    "PastRestart",
    "Ruling",
    "Verdict",
    "WorkerEnd",
    "blames_a_peer",
    "decide",
    "judge",
    "ruling_of",
    "still_counts",
]
