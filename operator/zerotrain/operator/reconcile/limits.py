"""Limits on how long an attempt may hold a part of what it needs. They are options of the operator, not of
the job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StartLimits:
    """Limits in seconds."""

    refused_creation_s: float = 60.0
    """Limit for pods that the API server rejects while other pods of the attempt exist."""
    start_deadline_s: float = 600.0
    """Limit for the pods without a node while others have one.

    A cluster autoscaler needs minutes to add a node. The job's own runPolicy.startDeadlineSeconds takes
    precedence.
    """
    max_hold_off_s: float = 300.0
    """Longest hold-off after an attempt that released what it held."""


START_LIMITS = StartLimits()
"""Defaults of the operator's options."""
