"""Ranks that are slower than their peers."""

from __future__ import annotations

from zerotrain.operator.reconcile.attempts import AttemptView
from zerotrain.operator.reconcile.draft import Draft


def tell(draft: Draft, view: AttemptView) -> None:
    """Emit an event that names rank and node."""
