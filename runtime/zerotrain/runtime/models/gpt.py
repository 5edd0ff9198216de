"""Byte-level GPT: pre-norm blocks, learned positions, causal attention, GELU, head tied to the embedding.

The trainer's own model, for the demonstration and for tests of the engine on a real model. A call on a batch
of token ids returns the loss, as for every model of the trainer.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from zerotrain.contract.train_spec import GptSpec
from zerotrain.runtime.activation.checkpoint import checkpoint_activations

BYTE_VOCABULARY = 256

_INIT_STD = 0.02


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        batch, tokens, d_model = x_BTD.shape
        qkv = self.qkv(x_BTD).view(batch, tokens, 3, self.heads, d_model // self.heads)
        q_BHTK, k_BHTK, v_BHTK = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        output: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, d_model))
        return output


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(d_model)
        self.attention = Attention(d_model, heads)
        self.norm_mlp = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD))
        output: torch.Tensor = x_BTD + self.mlp(self.norm_mlp(x_BTD))
        return output


class Gpt(nn.Module):
    """`model(ids)` with int64 ids `[batch, tokens + 1]` returns the next token's mean cross entropy
    (fp32)."""

    def __init__(
        self,
        spec: GptSpec,
        *,
        vocabulary: int = BYTE_VOCABULARY,
        tied_head: bool = True,
        checkpoint_activations: bool = False,
    ) -> None:
        """`checkpoint_activations`: recompute every block's activations in backward."""
        super().__init__()
        self.spec = spec
        self.vocabulary = vocabulary
        self.attention_width = spec.layers * spec.d_model
        self.checkpoint_activations = checkpoint_activations
        self.embed = nn.Embedding(vocabulary, spec.d_model)
        self.position = nn.Embedding(spec.context, spec.d_model)
        self.blocks = nn.ModuleList(Block(spec.d_model, spec.heads) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.d_model)
        self.head = nn.Linear(spec.d_model, vocabulary, bias=False)
        self.apply(_initialise)
        self._scale_residual_outputs()
        if tied_head:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of `ids[:, 1:]` given `ids[:, :-1]`. Raises ValueError for more tokens than
        context."""
        logits_BTV = self.logits(ids[:, :-1]).float()
        return functional.cross_entropy(logits_BTV.flatten(0, 1), ids[:, 1:].flatten())

    def logits(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next token, `[batch, tokens, vocabulary]`."""
        tokens = ids_BT.shape[1]
        if tokens > self.spec.context:
            raise ValueError(f"a sample has {tokens} tokens but the model's context is {self.spec.context}")
        positions = torch.arange(tokens, device=ids_BT.device)
        x_BTD = self.embed(ids_BT) + self.position(positions)
        for block in self.blocks:
            recomputed = self.checkpoint_activations
            x_BTD = checkpoint_activations(block, x_BTD) if recomputed else block(x_BTD)
        scores: torch.Tensor = self.head(self.norm(x_BTD))
        return scores

    def _scale_residual_outputs(self) -> None:
        # Two residual additions per block: without this the variance of x grows with the depth.
        std = _INIT_STD / math.sqrt(2 * self.spec.layers)
        for block in self.blocks:
            nn.init.normal_(block.attention.out.weight, std=std)  # type: ignore[union-attr, arg-type]
            nn.init.normal_(block.mlp[2].weight, std=std)  # type: ignore[index, union-attr]


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
