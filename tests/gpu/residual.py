"""The model of the parts of the GPU check that need no more than linear layers."""

from __future__ import annotations

import torch
from torch import nn


class Residual(nn.Module):
    """A residual chain of two-layer perceptrons, with the same weights each time."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x
