"""Time accounting of a step by phase. The forward and backward passes write it, the step boundary reads it.

Code that uses the weights may first have to wait for updates in the background. These waits are counted apart
from the pass in which they occur. Time in which training is suspended, such as a save or an evaluation,
belongs to no step.
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
    """Seconds since the previous boundary."""

    passes: dict[str, float]
    """Seconds of forward and backward; a new dict."""
    fenced: float
    """Seconds of waiting for updates."""
    published: float
    """Seconds spent on gathering updated weights into the replicas."""
    background: float
    """Seconds that a background thread spent on updates that have been waited for."""


class StepClock:
    """Clock of one engine; used by the training thread only."""

    def __init__(self, updates: PendingUpdates, comm: Comm) -> None:
        self._updates = updates
        self._comm = comm
        self._passes = dict.fromkeys(("forward", "backward"), 0.0)
        self._fenced = self._published = self._background = 0.0
        """Counts of `updates` at the previous boundary."""
        self._began = perf_counter()

    def now(self) -> float:
        """Return seconds of a clock that stops while an update in the background is waited for."""
        return perf_counter() - self._updates.fence_seconds - self._updates.replicas.seconds

    def add(self, name: str, *, since: float) -> None:
        """Add to `name` the duration of a pass that began when `now` returned `since`."""
        self._passes[name] += self.now() - since

    @property
    def step_seconds(self) -> float:
        """Seconds since the end of the previous step."""
        return perf_counter() - self._began

    def restart(self) -> None:
        """Begin the next step."""
        self._began = perf_counter()

    def take_lap(self) -> Lap:
        """Return the phases since the last call and reset them. Call it at a boundary, after all updates were
        waited for."""
        updates = self._updates
        lap = Lap(
            passes=self._passes,
            fenced=updates.fence_seconds - self._fenced,
            published=updates.replicas.seconds - self._published,
            background=updates.background_seconds - self._background,
        )
        self._passes = dict.fromkeys(self._passes, 0.0)
        self._fenced, self._published = updates.fence_seconds, updates.replicas.seconds
        self._background = updates.background_seconds
        return lap

    def count_published(self, seconds: float) -> None:
        """Leave these seconds of gathering out of the next lap, as the step that ends now reports them."""
        self._published += seconds

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Exclude what runs within from the step: passes, waits for updates and for collectives. May be
        nested."""
        updates, comm = self._updates, self._comm
        comm.poll_timings()
        waited, passes, step_seconds = comm.wait_seconds, dict(self._passes), self.step_seconds
        fenced = updates.fence_seconds - self._fenced
        published = updates.replicas.seconds - self._published
        try:
            yield
        finally:
            comm.poll_timings()
            comm.wait_seconds, self._passes = waited, passes
            self._began = perf_counter() - step_seconds
            self._fenced = updates.fence_seconds - fenced
            self._published = updates.replicas.seconds - published
