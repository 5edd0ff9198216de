"""Whether the ranks can form the groups of ZeRO++ hpZ, each of which holds every weight a second time.

Read by `rules.py` for the file, and by whoever looks for another stage or number of ranks.
"""

from __future__ import annotations


def can_group(*, stage: int, world_size: int, group_size: int) -> bool:
    """Whether so many ranks form groups of `group_size`; below stage 3 and alone a rank needs none."""
    return stage < 3 or world_size == 1 or world_size % max(group_size, 1) == 0
