"""How many slots buffers of contiguous checkpointing have: for the engine that makes them, and for plans."""

from __future__ import annotations

FIRST_SLOTS = 8
"""Of a buffer whose number of checkpoints nobody said."""


def next_buffer(made: int, number: int | None) -> int:
    """Slots of one more buffer beside the `made` that there are. `number` is that of the configuration
    (`number_checkpoints`); None starts small and doubles."""
    return number or max(FIRST_SLOTS, made)


def num_slots(needed: int, number: int | None) -> int:
    """Of all buffers together when `needed` are in use."""
    made = 0
    while made < needed:
        made += next_buffer(made, number)
    return made
