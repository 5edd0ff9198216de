"""Waiting for admission: queues, gangs, room for all workers."""

from __future__ import annotations

from zerotrain.operator.reconcile.attempts import AttemptView
from zerotrain.operator.reconcile.draft import Draft


def hold(draft: Draft) -> tuple[str, str] | None:
    """Reason and message of what the next attempt waits for; None when it may start. Asks for the objects
    that make it move."""
    return None


def evicted(draft: Draft, view: AttemptView) -> str | None:
    """Why the running attempt has to give its resources back; None when it may go on."""
    return None


def settle(draft: Draft) -> None:
    """In every pass, after the phase: tell the queue how far the job is."""
