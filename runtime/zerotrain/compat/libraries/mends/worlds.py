"""Check that a library sees the ranks that the launcher started."""

from __future__ import annotations

import os


class WrongWorld(RuntimeError):
    """A library takes a rank for a world of its own, so that each rank would train another model."""


def check_world(library: str, size: int) -> None:
    """Raise WrongWorld unless a library counts as many ranks as the launcher started."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if size != started:
        raise WrongWorld(
            f"{library} sees {size} rank(s), but the launcher started {started}: every rank would train a "
            "model of its own. Let the library join the launcher's process group (do not choose a device or "
            "a strategy for one process), or start one rank"
        )
