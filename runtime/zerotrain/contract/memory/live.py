"""How many elements of sharded weights are whole at once (stage 3): the engine's rules, replayed on sizes.

Called by `memory_inputs`, for a search many times with the same sizes: answers are kept. The engine's
`LiveWeights` decides by the same rules while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveWeights:
    """What the replay found, in elements."""

    forward: int
    """Whole at once in forward."""
    backward: int
    """Whole at once in backward, from the unit on at which all buffers of the reduction are in use."""
    kept: int
    """Whole from forward to backward, so gathered once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveRules:
    """In elements; see `zero_optimization` of the same names."""

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
        """Whole now."""

    def free(self, index: int) -> None:
        if index in self.live:
            self.live.discard(index)
            self.numel -= self.sizes[index]

    def _gather(self, index: int) -> None:
        if index not in self.live:
            self.live.add(index)
            self.numel += self.sizes[index]

    def use(self, index: int | None, upcoming: Sequence[int]) -> int:
        """Gather one unit and what comes next; the elements that are whole then."""
        if index is not None:
            self._gather(index)
        ahead = 0
        for following in upcoming if self.rules.prefetch else ():
            size = self.sizes[following]
            ahead += size
            if ahead > max(size, self.rules.prefetch):
                break
            if following not in self.live:
                if self.numel + size > self.rules.max_live:
                    break
                self._gather(following)
            if ahead >= self.rules.prefetch:
                break
        return self.numel

    def keeps(self, numel: int, following: int) -> bool:
        """Whether `numel` elements, beside the whole-pass ones, stay while so many following are used."""
        room = self.whole_pass + numel + following + self.largest
        return 0 < self.rules.max_reuse >= 2 * following and room <= self.rules.max_live


@lru_cache(maxsize=1024)
def replay_live(
    sizes: tuple[int, ...], *, whole_pass: int, rules: LiveRules, reduce_buffers: int
) -> LiveWeights:
    """One step with units of these sizes in the order of use; `whole_pass` elements are whole from the first
    to the last use of both forward and backward."""
    replay = _Replay(sizes, whole_pass, rules)
    order = range(len(sizes))
    forward, following = replay.use(None, order), sum(sizes)
    for index in order:
        forward = max(forward, replay.use(index, order[index + 1 :]))
        following -= sizes[index]
        if not replay.keeps(sizes[index], following):
            replay.free(index)
    kept = sum(sizes[index] for index in replay.live) + (whole_pass if replay.keeps(0, 0) else 0)
    back = order[::-1]
    replay.use(None, back)
    backward = [replay.numel] if not sizes else []
    for position, index in enumerate(back):
        backward.append(replay.use(index, back[position + 1 :]))
        replay.free(index)
    return LiveWeights(
        forward=forward, backward=max(backward[min(reduce_buffers, len(backward)) - 1 :]), kept=kept
    )
