"""A model with everything that makes shards uneven, for engines that save, load and resize."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class UnevenModel(nn.Module):
    """A model with odd sizes, tied and frozen weights, a buffer, and parameters kept whole at stage 3."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls: torch.Tensor

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.embed(ids[:, :-1])
        for block in self.blocks:
            hidden = hidden + functional.gelu(block(hidden))
        logits = self.head(hidden + self.base(hidden) * self.scale)
        return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
