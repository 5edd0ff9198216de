"""Room that is there wherever the scheduler puts the pods of jobs that were let in and have no nodes yet.

`capacity` counts such pods on the fullest nodes, kube-scheduler puts them on the emptiest ones. Where that
makes a difference, a job that is let in beside them could end with half of its pods bound, or leave
one of them so. Counted here is what each job costs the others at worst, and what they cost it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zerotrain.operator.reconcile.placement import Kind

MAX_GROUPS = 64
"""Kinds of jobs without nodes that are told apart; each new one is compared with all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """Workers of one kind, and where they may go."""

    key: tuple[object, ...]
    """Equal for jobs that only differ in their number of workers."""
    kind: Kind
    priority: int
    preempts: bool
    where: Mapping[str, int]
    """Node -> slots, at least one, with nothing counted that has no node."""
    room: int
    """Workers that fit there, after the topology."""
    fragility: int = 1
    """By how many workers `room` shrinks at most when one slot is lost: all values of the key, if spread."""


@dataclass(kw_only=True, slots=True)
class _Group:
    wish: Wish
    workers: int = 0
    left: int
    """Of the room, what one more job finds at worst: each worker of the group costs it `fragility`."""
    sizes: set[int] = field(default_factory=set)
    """Of the jobs in the group."""

    def spare(self) -> int | None:
        """Of the job that has the least: workers of its room that may be lost still. Its own take one each:
        a job that spreads fills the values of the key in turn. None where nobody can be promised room."""
        own = self.wish.fragility - 1
        found = (self.left + size * own for size in self.sizes)
        return min((spare for spare in found if spare >= 0), default=None)


class Unplaced:
    """The jobs of one round that have workers without nodes."""

    def __init__(self) -> None:
        self._groups: dict[tuple[object, ...], _Group] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def fits(self, wish: Wish, workers: int) -> bool:
        """Whether all of them find room, and leave the others theirs, wherever each goes."""
        if wish.key not in self._groups and len(self._groups) >= MAX_GROUPS:
            return False
        if self._left(wish) < workers:
            return False
        for key, group in self._groups.items():
            spare, cost = group.spare(), wish.fragility if key == wish.key else _cost(wish, group.wish)
            if spare is not None and spare < workers * cost:
                return False
        return True

    def add(self, wish: Wish, workers: int) -> None:
        """Count workers that were let in, whether or not they fit."""
        left = self._left(wish)
        for key, group in self._groups.items():
            if key != wish.key:
                group.left -= workers * _cost(wish, group.wish)
        own = self._groups.get(wish.key)
        if own is None and len(self._groups) < MAX_GROUPS:
            own = self._groups[wish.key] = _Group(wish=wish, left=left)
        if own is not None:
            own.workers += workers
            own.left -= workers * wish.fragility
            own.sizes.add(workers)

    def _left(self, wish: Wish) -> int:
        """What is left of the wish's room once all others took the slots that it misses most."""
        group = self._groups.get(wish.key)
        if group is not None:
            return group.left
        return wish.room - sum(other.workers * _cost(other.wish, wish) for other in self._groups.values())


def _cost(pod: Wish, other: Wish) -> int:
    """Workers of `other` that one of `pod` may cost, at most."""
    if other.preempts and pod.priority < other.priority:
        return 0
    shared = pod.where.keys() & other.where.keys()
    if not shared:
        return 0
    each = max(
        (-(-pod.kind.each.get(name, 0) // amount) for name, amount in other.kind.each.items() if amount > 0),
        default=0,
    )
    return min(each, max(other.where[name] for name in shared)) * other.fragility
