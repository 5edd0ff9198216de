"""Workers that have to leave their nodes: the whole job moves, once."""

from __future__ import annotations

from zerotrain.operator.reconcile.attempts import AttemptView
from zerotrain.operator.reconcile.draft import Draft


def move_wanted(draft: Draft, view: AttemptView) -> str | None:
    """Why the attempt should move; None when no worker has to."""
    return None
