"""Mends of transformers: models under stage 3, and where the Trainer looks for the engine's checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from zerotrain.compat.libraries.mends.around import Function, around
from zerotrain.runtime.models.from_pretrained import take_over


def load_own_checkpoints(module: ModuleType) -> None:
    """Make the Trainer's resume accept the engine's names of checkpoints beside `global_step*`."""

    module.deepspeed_load_checkpoint = load_checkpoint  # type: ignore[attr-defined]


def load_checkpoint(
    deepspeed_engine: Any, checkpoint_path: str | Path, load_module_strict: bool = True, **choice: bool
) -> None:
    """Load a checkpoint of the engine; `choice` goes to its `load_checkpoint`. Raises ValueError where there
    is none."""
    found, _ = deepspeed_engine.load_checkpoint(
        checkpoint_path, load_module_strict=load_module_strict, **choice
    )
    if found is None:
        raise ValueError(f"{checkpoint_path} has no checkpoint of the engine to resume from")


def keep_own_optimizers(module: ModuleType) -> None:
    """Make the Trainer train with the optimizer and the schedule that its caller gave it (`optimizers=...`).

    `deepspeed_init` replaces both by those of the arguments. A JSON that names an optimizer or a scheduler
    still decides.
    """

    @around(module, "deepspeed_init")
    def deepspeed_init(init: Function, trainer: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        own, own_schedule = trainer.optimizer, trainer.lr_scheduler
        optimizer, schedule = init(trainer, *args, **kwargs)
        if _is_given(own) and isinstance(optimizer, torch.optim.Optimizer):
            return own, own_schedule if schedule is None else schedule
        return optimizer, schedule


def _is_given(optimizer: object) -> bool:
    """Return whether an optimizer is the caller's: that of an earlier `train` is wrapped."""
    return isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, AcceleratedOptimizer)


def read_weights_by_ranges(module: ModuleType) -> None:
    """Make `from_pretrained` and `from_config` build models without memory under stage 3."""
    take_over(module)
