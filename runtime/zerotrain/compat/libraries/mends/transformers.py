"""Mends of transformers: models under stage 3, and where the Trainer looks for the engine's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from zerotrain.runtime.construct.context import whole_models


def load_own_checkpoints(module: ModuleType) -> None:
    """Make the Trainer's resume accept the engine's names of checkpoints beside `global_step*`."""

    def deepspeed_load_checkpoint(
        deepspeed_engine: Any, checkpoint_path: str | Path, load_module_strict: bool = True
    ) -> None:
        found, _ = deepspeed_engine.load_checkpoint(checkpoint_path, load_module_strict=load_module_strict)
        if found is None:
            raise ValueError(f"{checkpoint_path} has no checkpoint of the engine to resume from")

    module.deepspeed_load_checkpoint = deepspeed_load_checkpoint  # type: ignore[attr-defined]


def build_whole_models(module: ModuleType) -> None:
    """Make `from_pretrained` and `from_config` build whole models on the host under stage 3.

    transformers enters `zero.Init` for the constructor alone, and then loads or initialises on rank 0 what
    the engine has not recorded. `prevent_arange_dtype_change` is the context around `zero.Init`.
    """

    @contextmanager
    def around_init() -> Iterator[None]:
        with whole_models():
            yield

    module.prevent_arange_dtype_change = around_init  # type: ignore[attr-defined]
