"""Properties of optimizers: where and in which formats their states can be kept, and their highest stage.

Used by `rules.py` for the file, by `setup` for an optimizer of the caller, and by the byte formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REMAINDERS = "bf16.store_param_remainders"
"""Key that requests master weights in two halves."""

BF16_MASTERS = "bf16.bf16_master_weights_and_grads"
"""Key that makes bf16 weights their own masters and sums gradients in bf16."""

BF16_STATES = "bf16.bf16_optimizer_states"
"""Key that requests optimizer states in bf16."""

BF16_UPDATES = ("AdamW", "Adam", "SGD", "Adagrad", "Lion")
"""Optimizers whose masters, gradients and states may be bf16."""

OFFLOADABLE = ("AdamW", "Adam", "SGD", "Adagrad", "Lion", "Muon")
"""Optimizers whose states are updated element by element, once all that needs whole matrices is computed."""

NATIVE = ("AdamW", "Adam", "Adagrad", "Lion")
"""Optimizers that have a native one-pass update."""

HIGHEST_STAGE: Mapping[str, int] = {"OneBitAdam": 1}
"""Optimizers that need unreduced gradients, which stages 2 and 3 do not keep because they reduce at once."""


def highest_stage(optimizer_type: str | None) -> int:
    """Return the highest ZeRO stage of the optimizer, 0 to 3. None stands for the engine's AdamW."""
    return 3 if optimizer_type is None else HIGHEST_STAGE.get(optimizer_type, 3)


def can_offload(optimizer_type: str | None) -> bool:
    """Return whether the update can run off the accelerator. None stands for the engine's AdamW."""
    return optimizer_type is None or optimizer_type in OFFLOADABLE


def can_update_bf16(optimizer_type: str | None) -> bool:
    """Return whether the update can keep masters and states in bf16. None stands for the engine's AdamW."""
    return optimizer_type is None or optimizer_type in BF16_UPDATES


def can_split_master(optimizer_type: str | None, params: Mapping[str, Any]) -> bool:
    """Return whether the update can use a weight and its remainder. None stands for the engine's AdamW."""
    if optimizer_type is None:
        return True
    asks_for_torch = bool(params.get("amsgrad")) or bool(params.get("torch_adam"))
    return optimizer_type in NATIVE and not asks_for_torch
