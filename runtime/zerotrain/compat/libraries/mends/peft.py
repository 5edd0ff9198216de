"""Mends of PEFT: adapters that are made from rows of a partitioned weight, or are added to it in a pass."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from zerotrain.compat.libraries.mends.around import Function, around


def read_rows_on_every_rank(module: ModuleType) -> None:
    """Make trainable tokens start from their rows of the embedding under stage 3, on any device.

    PEFT lets rank 0 send them between GPUs. Here a weight is whole on each rank while it is gathered.
    """

    def collect(self: Any, weight: torch.Tensor, rows: Any, embed_dim: int) -> torch.Tensor:
        with module.gather_params_ctx([weight], modifier_rank=None):
            return weight[rows].detach().clone()

    module.TrainableTokensLayer._collect_token_weights = collect


def add_to_parameters_without_writes(module: ModuleType) -> None:
    """Make a parametrization that begins with the parameter itself leave that as it is.

    PEFT puts one around each of `target_parameters` for a pass. torch then sets the parameter to its own
    memory, which counts as a write: into a weight that is partitioned, it is refused.
    """

    @around(module.nn.utils.parametrize, "_maybe_set")
    def maybe_set(put: Function, target: torch.Tensor, source: torch.Tensor) -> None:
        if source is not target:
            put(target, source)
