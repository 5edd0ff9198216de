"""For how long an attempt may hold a part of what it needs. The operator's options, not the job's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StartLimits:
    """In seconds."""

    refused_creation_s: float = 60.0
    """For pods that the API server refuses, beside others that exist."""
    start_deadline_s: float = 600.0
    """For a node for the rest, beside pods that have one: a cluster autoscaler needs minutes to bring one. A
    job's own runPolicy.startDeadlineSeconds goes before it."""
    max_hold_off_s: float = 300.0
    """The longest hold-off between two attempts of which the first gave back what it held."""


START_LIMITS = StartLimits()
"""Unless the operator was started with others."""
