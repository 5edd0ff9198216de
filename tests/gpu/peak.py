"""Contents of a GPU's memory at the peak of a step, by the source lines that allocated them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

EVENTS = 1_000_000
SHOWN, FRAMES = 16, 4
NEUTRAL = ("/autograd/", "/nn/modules/module.py", "/utils/_contextlib.py", "/tests/gpu/")
"""Parts of file names whose frames say nothing about who allocates."""


def at_peak(step: Callable[[], None]) -> list[str]:
    """Run a step and return the largest groups of allocations that it made and that live at its peak, each as
    `MiB  innermost line < its caller < ...`. Gradients that autograd allocates have no line."""
    memory: Any = torch.cuda.memory
    memory._record_memory_history(max_entries=EVENTS, context="alloc", stacks="python")
    try:
        step()
        torch.cuda.synchronize()
        events = memory._snapshot()["device_traces"][0]
    finally:
        memory._record_memory_history(enabled=None)
    sizes = Counter[str]()
    for event in living(events, until=highest(events)):
        sizes[lines_of(event)] += event["size"]
    return [f"{size / 2**20:.1f}  {lines}" for lines, size in sizes.most_common(SHOWN)]


def highest(events: Sequence[dict[str, Any]]) -> int:
    """Return the index of the event at which most is allocated."""
    now = most = where = 0
    for index, event in enumerate(events):
        now += {"alloc": 1, "free_completed": -1}.get(event["action"], 0) * event["size"]
        if now > most:
            most, where = now, index
    return where


def living(events: Sequence[dict[str, Any]], *, until: int) -> list[dict[str, Any]]:
    """Return the allocations that are not freed after the event `until`."""
    found: dict[int, dict[str, Any]] = {}
    for event in events[: until + 1]:
        if event["action"] == "alloc":
            found[event["addr"]] = event
        elif event["action"] == "free_completed":
            found.pop(event["addr"], None)
    return list(found.values())


def lines_of(event: dict[str, Any]) -> str:
    names = [(frame["filename"], frame["line"]) for frame in event.get("frames", ())]
    lines = [
        f"{Path(name).name}:{line}"
        for name, line in names
        if name.endswith(".py") and not any(part in name for part in NEUTRAL)
    ]
    return " < ".join(lines[:FRAMES])
