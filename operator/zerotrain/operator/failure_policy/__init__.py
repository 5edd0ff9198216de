"""The failure policy: the meaning of a worker's end, the user's rules on it, and the decision on a restart.

All functions are pure. `reconcile` calls them for jobs in the cluster, `zerotrain run` for jobs on this
machine.
"""

from .classification import (
    ABORTED,
    ABOUT_FILES,
    BY_KUBELET,
    HUNG,
    NOT_STARTED,
    UNKNOWN_ENDS,
    Evidence,
    FailureClass,
    blames_a_peer,
    classify,
)
from .decision import Decision, action_of, decide, matching_rule, still_counts

__all__ = [
    "ABORTED",
    "ABOUT_FILES",
    "BY_KUBELET",
    "HUNG",
    "NOT_STARTED",
    "UNKNOWN_ENDS",
    "Decision",
    "Evidence",
    "FailureClass",
    "action_of",
    "blames_a_peer",
    "classify",
    "decide",
    "matching_rule",
    "still_counts",
]
