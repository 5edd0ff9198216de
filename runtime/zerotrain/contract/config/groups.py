"""The condition for the groups of ZeRO++ hpZ, each of which holds every weight a second time.

Used by `rules.py` for the file, and by searches for another stage or number of ranks.
"""

from __future__ import annotations


def can_group(*, stage: int, world_size: int, group_size: int) -> bool:
    """Return whether the ranks can form groups of `group_size`.

    Below stage 3, and with a single rank, no groups are needed, so any size is accepted.
    """
    return stage < 3 or world_size == 1 or world_size % max(group_size, 1) == 0
