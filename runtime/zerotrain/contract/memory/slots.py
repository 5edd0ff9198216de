"""Number of slots in the buffers of contiguous checkpointing, for the engine and for plans."""

from __future__ import annotations

FIRST_SLOTS = 8
"""Slots of the first buffer if no number of checkpoints is configured."""


def next_buffer(made: int, number: int | None) -> int:
    """Return the slots of one more buffer beside the `made` existing slots.

    `number` is that of the configuration (`number_checkpoints`); None starts small and doubles.
    """
    return number or max(FIRST_SLOTS, made)


def num_slots(needed: int, number: int | None) -> int:
    """Return the slots of all buffers together when `needed` are in use."""
    made = 0
    while made < needed:
        made += next_buffer(made, number)
    return made
