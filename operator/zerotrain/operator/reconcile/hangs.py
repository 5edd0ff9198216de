"""Attempts whose step stopped moving."""

from __future__ import annotations

from zerotrain.operator.reconcile.attempts import AttemptView, Failure
from zerotrain.operator.reconcile.draft import Draft


def hang_of(draft: Draft, view: AttemptView) -> Failure | None:
    """The hang, as the failure of the rank that holds up the others; None while all is well."""
    return None
