"""Which optimizers can leave the accelerator, which can keep their master weights in two halves, and up to
which stage they run.

Read by `rules.py` for the file, by `setup` for the optimizer that a caller brings, and by the byte formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REMAINDERS = "bf16.store_param_remainders"
"""The key that asks for master weights in two halves."""

ELEMENTWISE = ("AdamW", "Adam", "SGD", "Adagrad", "Lion")
"""Optimizers whose update of an element needs nothing but that element."""

NATIVE = ("AdamW", "Adam", "Adagrad", "Lion")
"""Those that have a native one-pass update."""

HIGHEST_STAGE: Mapping[str, int] = {"OneBitAdam": 1}
"""Optimizers that need gradients that nobody has reduced, which stages 2 and 3 do at once."""


def highest_stage(optimizer_type: str | None) -> int:
    """The highest ZeRO stage that the optimizer runs at, 0 to 3; None = the engine's AdamW."""
    return 3 if optimizer_type is None else HIGHEST_STAGE.get(optimizer_type, 3)


def can_offload(optimizer_type: str | None) -> bool:
    """Whether the update can run away from the accelerator; None = the engine's AdamW."""
    return optimizer_type is None or optimizer_type in ELEMENTWISE


def can_split_master(optimizer_type: str | None, params: Mapping[str, Any]) -> bool:
    """Whether the update can work on a weight and its remainder; None = the engine's AdamW."""
    if optimizer_type is None:
        return True
    asks_for_torch = bool(params.get("amsgrad")) or bool(params.get("torch_adam"))
    return optimizer_type in NATIVE and not asks_for_torch
