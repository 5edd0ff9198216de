"""How many workers the next attempt has, and when a running one should be resized."""

from __future__ import annotations

from zerotrain.operator.api import AttemptShape
from zerotrain.operator.reconcile.attempts import AttemptView
from zerotrain.operator.reconcile.draft import Draft


def next_shape(draft: Draft) -> AttemptShape:
    """For the attempt that starts now."""
    return AttemptShape(workers=draft.job.spec.workers)


def resize_wanted(draft: Draft, view: AttemptView) -> str | None:
    """Why the running attempt should go on in another size; None when it is as it should be."""
    return None
