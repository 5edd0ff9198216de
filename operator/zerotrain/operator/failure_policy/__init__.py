"""What a worker's end means, what the user's rules say about it, and whether there is another attempt.

Pure. `reconcile` asks for jobs in the cluster, `zerotrain run` for those on this machine.
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
