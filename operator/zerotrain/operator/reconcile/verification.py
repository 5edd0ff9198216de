"""Checking a durable checkpoint with a one-shot pod."""

from __future__ import annotations

from zerotrain.operator.reconcile.draft import Draft


def advance(draft: Draft) -> None:
    """In every pass, after the phase."""
