"""Models of a few thousand parameters, shaped like the real ones, for tests of the engine."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.support.device import DEVICE

VOCABULARY, WIDTH, CONTEXT = 64, 32, 8


class TinyBlock(nn.Module):
    """A block with pre-norm attention and MLP."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm1(hidden)).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended)
        mixed: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm2(hidden))))
        return hidden + mixed


class TinyGPT(nn.Module):
    """A model that maps tokens and targets (batch, context) to the mean loss.

    `checkpointing`: None, "reentrant", "saved", or "whole" (as "saved", but recomputed to the end of a
    block).
    """

    def __init__(self, *, layers: int = 3, tied: bool = False, checkpointing: str | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(TinyBlock() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            if self.checkpointing is None:
                hidden = block(hidden)
            else:
                with set_checkpoint_early_stop(self.checkpointing != "whole"):
                    hidden = checkpoint(block, hidden, use_reentrant=self.checkpointing == "reentrant")
        logits = self.head(self.norm(hidden)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def token_batches(num_batches: int, *, size: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return fixed (tokens, targets) pairs of `size` samples; the targets can be learnt from the tokens."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num_batches):
        tokens = torch.randint(0, VOCABULARY, (size, CONTEXT), generator=generator)
        batches.append((tokens.to(DEVICE), ((tokens * 3 + 1) % VOCABULARY).to(DEVICE)))
    return batches
