"""Scripts of others in a job, unchanged: what they report, when they stop, and from what they resume.

`reporting` tells the launcher what the engine does. `trainer` and `arguments` are called where
`zerotrain.compat.libraries` changed transformers: they keep its checkpoints whole (`folders`, `records`) and
its global batch the same. `place` is where ranks start. Outside of a job nothing of this happens.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def function(home: str, name: str) -> Callable[..., Any]:
    """Return a function of one of the modules, which is loaded now: it loads the engine."""
    found: Callable[..., Any] = getattr(import_module(f"{__name__}.{home}"), name)
    return found
