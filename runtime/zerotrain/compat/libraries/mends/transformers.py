"""Mends of transformers: models under stage 3, and where the Trainer looks for the engine's checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from zerotrain.runtime.models.from_pretrained import take_over


def load_own_checkpoints(module: ModuleType) -> None:
    """Make the Trainer's resume accept the engine's names of checkpoints beside `global_step*`."""

    def deepspeed_load_checkpoint(
        deepspeed_engine: Any, checkpoint_path: str | Path, load_module_strict: bool = True
    ) -> None:
        found, _ = deepspeed_engine.load_checkpoint(checkpoint_path, load_module_strict=load_module_strict)
        if found is None:
            raise ValueError(f"{checkpoint_path} has no checkpoint of the engine to resume from")

    module.deepspeed_load_checkpoint = deepspeed_load_checkpoint  # type: ignore[attr-defined]


def read_weights_by_ranges(module: ModuleType) -> None:
    """Make `from_pretrained` and `from_config` build models without memory under stage 3."""
    take_over(module)
