"""Mends of PEFT: adapters that are made from rows of a partitioned weight."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


def read_rows_on_every_rank(module: ModuleType) -> None:
    """Make trainable tokens start from their rows of the embedding under stage 3, on any device.

    PEFT lets rank 0 send them between GPUs. Here a weight is whole on each rank while it is gathered.
    """

    def collect(self: Any, weight: torch.Tensor, rows: Any, embed_dim: int) -> torch.Tensor:
        with module.gather_params_ctx([weight], modifier_rank=None):
            return weight[rows].detach().clone()

    module.TrainableTokensLayer._collect_token_weights = collect
