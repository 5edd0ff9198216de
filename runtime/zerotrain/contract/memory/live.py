"""Elements of sharded weights that are whole at once (stage 3), by a replay of the engine's rules.

`memory_inputs` calls it, in a search many times with the same sizes, so answers are cached. The engine's
`LiveWeights` decides by the same rules while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveWeights:
    """Result of the replay, in elements."""

    forward: int
    """Elements that are whole at once in forward."""
    backward: int
    """Elements that are whole at once in backward.

    It counts from the unit on at which all buffers of the reduction are in use.
    """
    kept: int
    """Elements that are whole from forward to backward, and therefore gathered once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveRules:
    """Limits in elements, named as in `zero_optimization`."""

    prefetch: int
    max_live: int
    max_reuse: int


class _Replay:
    def __init__(self, sizes: Sequence[int], whole_pass: int, rules: LiveRules) -> None:
        self.sizes = sizes
        self.whole_pass = whole_pass
        self.rules = rules
        self.largest = max([*sizes, whole_pass], default=0)
        self.live: set[int] = set()
        self.numel = whole_pass
        """Elements that are whole now."""
        self._ahead = 0
        self._next = 0
        self._order: Sequence[int] = ()

    def start(self, order: Sequence[int]) -> int:
        """Begin a pass over the units in this order, and return the elements that are whole then."""
        self._order, self._next, self._ahead = order, 0, 0
        return self._prefetch()

    def free(self, index: int) -> None:
        if index in self.live:
            self.live.discard(index)
            self.numel -= self.sizes[index]

    def _gather(self, index: int) -> None:
        if index not in self.live:
            self.live.add(index)
            self.numel += self.sizes[index]

    def use(self, place: int) -> int:
        """Gather the unit at this place of the order and prefetch others; return the elements whole then."""
        index = self._order[place]
        self._gather(index)
        if self._next > place:
            self._ahead -= self.sizes[index]
        else:
            self._next, self._ahead = place + 1, 0
        return self._prefetch()

    def _prefetch(self) -> int:
        """Gather the following units within the limits, and return the elements whole then.

        The units between the one in use and the next one to look at are whole already and have `_ahead`
        elements, since no unit is freed before its use. So every unit is looked at once, however far ahead it
        is.
        """
        prefetch = self.rules.prefetch
        while prefetch and self._ahead < prefetch and self._next < len(self._order):
            following = self._order[self._next]
            size = self.sizes[following]
            if self._ahead + size > max(size, prefetch):
                break
            if following not in self.live:
                if self.numel + size > self.rules.max_live:
                    break
                self._gather(following)
            self._ahead += size
            self._next += 1
        return self.numel

    def keeps(self, numel: int, following: int) -> bool:
        """Return whether `numel` elements, beside the whole-pass ones, stay while `following` are used."""
        total = self.whole_pass + numel + following + self.largest
        return 0 < self.rules.max_reuse >= 2 * following and total <= self.rules.max_live


@lru_cache(maxsize=1024)
def replay_live(
    sizes: tuple[int, ...], *, whole_pass: int, rules: LiveRules, reduce_buffers: int
) -> LiveWeights:
    """Replay one step with units of these sizes in the order of use.

    `whole_pass` elements are whole from the first to the last use of both forward and backward.
    """
    replay = _Replay(sizes, whole_pass, rules)
    order = range(len(sizes))
    forward, following = replay.start(order), sum(sizes)
    for index in order:
        forward = max(forward, replay.use(index))
        following -= sizes[index]
        if not replay.keeps(sizes[index], following):
            replay.free(index)
    kept = sum(sizes[index] for index in replay.live) + (whole_pass if replay.keeps(0, 0) else 0)
    back = order[::-1]
    replay.start(back)
    backward = [replay.numel] if not sizes else []
    for position, index in enumerate(back):
        backward.append(replay.use(position))
        replay.free(index)
    return LiveWeights(
        forward=forward, backward=max(backward[min(reduce_buffers, len(backward)) - 1 :]), kept=kept
    )
