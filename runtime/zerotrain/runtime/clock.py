"""Which seconds are a step's, and in which phase: read by the step boundary, written by the passes.

Waits for updates in the background end wherever somebody uses the weights, so they are kept apart from the
pass that met them. What training stands still for, a save or an evaluation, is no step's at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.zero.pending import PendingUpdates


@dataclass(frozen=True, kw_only=True, slots=True)
class Lap:
    """Seconds since the boundary before."""

    passes: dict[str, float]
    """forward and backward; a new dict."""
    fenced: float
    """Waits for updates."""
    published: float
    """What it took to bring replicas up to date."""
    background: float
    """What a thread spent on updates that were waited for."""


class StepClock:
    """Of one engine; used by the thread that trains."""

    def __init__(self, updates: PendingUpdates, comm: Comm) -> None:
        self._updates = updates
        self._comm = comm
        self._passes = dict.fromkeys(("forward", "backward"), 0.0)
        self._fenced = self._published = self._background = 0.0
        """The counts of `updates` at the boundary before."""
        self._began = perf_counter()

    def now(self) -> float:
        """Seconds that stand still while an update in the background is waited for."""
        return perf_counter() - self._updates.fence_seconds - self._updates.gather_seconds

    def add(self, name: str, *, since: float) -> None:
        """A pass is over that began when `now` said `since`."""
        self._passes[name] += self.now() - since

    @property
    def step_seconds(self) -> float:
        """Since the end of the step before."""
        return perf_counter() - self._began

    def restart(self) -> None:
        """A step ends here."""
        self._began = perf_counter()

    def take_lap(self) -> Lap:
        """At a boundary, when every update was waited for."""
        updates = self._updates
        lap = Lap(
            passes=self._passes,
            fenced=updates.fence_seconds - self._fenced,
            published=updates.gather_seconds - self._published,
            background=updates.background_seconds - self._background,
        )
        self._passes = dict.fromkeys(self._passes, 0.0)
        self._fenced, self._published = updates.fence_seconds, updates.gather_seconds
        self._background = updates.background_seconds
        return lap

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Nothing within counts for a step: no pass, no wait for an update or a collective. May be nested."""
        updates, comm = self._updates, self._comm
        comm.poll_timings()
        waited, passes, step_seconds = comm.wait_seconds, dict(self._passes), self.step_seconds
        fenced = updates.fence_seconds - self._fenced
        published = updates.gather_seconds - self._published
        try:
            yield
        finally:
            comm.poll_timings()
            comm.wait_seconds, self._passes = waited, passes
            self._began = perf_counter() - step_seconds
            self._fenced = updates.fence_seconds - fenced
            self._published = updates.gather_seconds - published
