"""Optimizers that only name one of the engine's updates, for scripts that make their optimizer themselves.

torch has no LAMB and no Lion; `initialize` takes an object of these classes with its groups and options and
replaces it by the engine's own optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch


class NamedOptimizer(torch.optim.Optimizer):
    """Groups and options of an update of the engine."""

    update_name: ClassVar[str]
    """Name of the update in the configuration's `optimizer.type`."""
    shared_options: ClassVar[tuple[str, ...]] = ()
    """Options that must be equal in all groups."""

    def step(self, closure: Callable[[], Any] | None = None) -> NoReturn:
        """Raise RuntimeError: the engine does the update."""
        raise RuntimeError(
            f"{type(self).__name__} has no update of its own: pass it to initialize(optimizer=...), and call "
            "engine.step()"
        )
