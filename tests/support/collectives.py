"""Records an engine's collectives, or delays their start so that races show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerotrain.runtime.comm.work import Delays
from zerotrain.runtime.engine import Engine

COLLECTIVES = {
    # method of Comm: its name in the events
    "all_gather": "all_gather",
    "start_exchange": "exchange",
    "broadcast": "broadcast",
    "gather_record": "gather_record",
}
LONGEST_S = 0.003

Events = list[tuple[str, str]]
"""Pairs (collective, unit) for starts, and (collective done, unit) for waits for the result."""


def watch_collectives(engine: Engine) -> Events:
    """Return a list that records every start of a collective, and every wait for one, from now on."""
    seen: Events = []

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            label = kwargs.get("label", "")
            seen.append((name, label))
            handle = call(*args, **kwargs)
            _note_wait(handle, lambda: seen.append((f"{name} done", label)))
            return handle

        return noted

    for method, name in COLLECTIVES.items():
        setattr(engine.comm, method, watched(name, getattr(engine.comm, method)))
    engine.core.reducer.start_exchange = engine.comm.start_exchange  # the reducer keeps the old method
    return seen


def _note_wait(handle: Any, note: Callable[[], None]) -> None:
    """Record waits for a handle.

    `Pending` and `Exchange` have a wait; records and broadcasts return when they are done.
    """
    pending = getattr(getattr(handle, "wait", None), "__self__", handle)  # that of an Exchange is a Pending's
    wait = getattr(pending, "_wait", None)
    if wait is not None:

        def noted() -> None:
            note()
            wait()

        pending._wait = noted


def delay_collectives(engine: Engine, *, seed: int, longest_s: float = LONGEST_S) -> None:
    """Sleep up to `longest_s` before every collective and before every wait for one; `seed` per rank."""
    engine.comm._delays = Delays(longest_s, seed=seed)
