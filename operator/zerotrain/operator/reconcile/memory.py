"""The memory planner at the gate: a job that cannot fit must not get pods."""

from __future__ import annotations

from zerotrain.operator.reconcile.draft import Draft


def does_not_fit(draft: Draft) -> tuple[str, str] | None:
    """Reason and message when no worker could hold its ranks; None when they fit or nobody can tell."""
    return None
