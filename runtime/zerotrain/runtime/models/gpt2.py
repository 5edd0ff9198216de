"""GPT-2 with the names and shapes of transformers; its linear layers (`Conv1D`) store [in, out] weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zerotrain.runtime.activation.checkpoint import checkpoint_activations
from zerotrain.runtime.models.causal_lm import (
    CausalLmOutput,
    UnsupportedModel,
    activation,
    attention_allowed,
    next_token_loss,
)

_REFUSED = ("reorder_and_upcast_attn", "add_cross_attention")


class Conv1D(nn.Module):
    """x @ weight + bias with weight [in, out]."""

    def __init__(self, out_width: int, in_width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_width, out_width))
        self.bias = nn.Parameter(torch.zeros(out_width))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, raw: Mapping[str, Any], index: int) -> None:
        super().__init__()
        width, self.heads = int(raw["n_embd"]), int(raw["n_head"])
        self.c_attn = Conv1D(3 * width, width)
        self.c_proj = Conv1D(width, width)
        self.resid_dropout = nn.Dropout(raw.get("resid_pdrop", 0.1))
        self.dropout = float(raw.get("attn_pdrop", 0.1))
        self.scale = (width // self.heads) ** -0.5 if raw.get("scale_attn_weights", True) else 1.0
        if raw.get("scale_attn_by_inverse_layer_idx", False):
            self.scale /= index + 1

    def forward(self, x_BTD: torch.Tensor, padding_BT: torch.Tensor | None) -> torch.Tensor:
        batch, tokens, width = x_BTD.shape
        parts = self.c_attn(x_BTD).view(batch, tokens, 3, self.heads, width // self.heads)
        q_BHTK, k_BHTK, v_BHTK = parts.permute(2, 0, 3, 1, 4)
        allowed = attention_allowed(tokens, window=None, padding_BT=padding_BT, device=x_BTD.device)
        mixed_BHTK = functional.scaled_dot_product_attention(
            q_BHTK,
            k_BHTK,
            v_BHTK,
            attn_mask=allowed,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=allowed is None,
            scale=self.scale,
        )
        mixed = self.c_proj(mixed_BHTK.transpose(1, 2).reshape(batch, tokens, width))
        output: torch.Tensor = self.resid_dropout(mixed)
        return output


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        super().__init__()
        width = int(raw["n_embd"])
        inner = int(raw.get("n_inner") or 4 * width)
        self.c_fc = Conv1D(inner, width)
        self.c_proj = Conv1D(width, inner)
        self.activation = activation(str(raw.get("activation_function", "gelu_new")))
        self.dropout = nn.Dropout(raw.get("resid_pdrop", 0.1))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.dropout(self.c_proj(self.activation(self.c_fc(x_BTD))))
        return output


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, raw: Mapping[str, Any], index: int) -> None:
        super().__init__()
        width, eps = int(raw["n_embd"]), float(raw.get("layer_norm_epsilon", 1e-5))
        self.ln_1 = nn.LayerNorm(width, eps=eps)
        self.attn = Attention(raw, index)
        self.ln_2 = nn.LayerNorm(width, eps=eps)
        self.mlp = Mlp(raw)

    def forward(self, x_BTD: torch.Tensor, padding_BT: torch.Tensor | None) -> torch.Tensor:
        x_BTD = x_BTD + self.attn(self.ln_1(x_BTD), padding_BT)
        output: torch.Tensor = x_BTD + self.mlp(self.ln_2(x_BTD))
        return output


class Body(nn.Module):
    """The layers below the head; `transformer.` in the names of the files."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        super().__init__()
        width = int(raw["n_embd"])
        self.wte = nn.Embedding(int(raw["vocab_size"]), width)
        self.wpe = nn.Embedding(int(raw["n_positions"]), width)
        self.drop = nn.Dropout(raw.get("embd_pdrop", 0.1))
        self.h = nn.ModuleList(Block(raw, index) for index in range(int(raw["n_layer"])))
        self.ln_f = nn.LayerNorm(width, eps=float(raw.get("layer_norm_epsilon", 1e-5)))
        self.checkpoint_activations = False

    def forward(self, ids_BT: torch.Tensor, padding_BT: torch.Tensor | None) -> torch.Tensor:
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x_BTD = self.drop(self.wte(ids_BT) + self.wpe(positions_T))
        for block in self.h:
            run = partial(block, padding_BT=padding_BT)
            x_BTD = checkpoint_activations(run, x_BTD) if self.checkpoint_activations else run(x_BTD)
        output: torch.Tensor = self.ln_f(x_BTD)
        return output


class Gpt2(nn.Module):
    """Causal language model: `model(input_ids, labels=input_ids).loss`, as in transformers."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        """`raw` is a `config.json`. Raises UnsupportedModel naming the key."""
        super().__init__()
        for key in _REFUSED:
            if raw.get(key):
                raise UnsupportedModel(f"{key} of GPT-2 is not supported; install transformers, which has it")
        try:
            self.transformer = Body(raw)
            width, self.vocabulary = int(raw["n_embd"]), int(raw["vocab_size"])
            self.context = int(raw["n_positions"])
            self.attention_width = width * int(raw["n_layer"])
        except KeyError as error:
            raise UnsupportedModel(f"config.json of a GPT-2 model needs {error}") from None
        self.lm_head = nn.Linear(width, self.vocabulary, bias=False)
        self._initialise(float(raw.get("initializer_range", 0.02)), layers=int(raw["n_layer"]))
        if raw.get("tie_word_embeddings", True):
            self.lm_head.weight = self.transformer.wte.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> CausalLmOutput:
        """Run the model. Ids, mask (1 = a token, 0 = padding) and labels are `[batch, tokens]`."""
        logits_BTV = self.lm_head(self.transformer(input_ids, attention_mask))
        loss = None if labels is None else next_token_loss(logits_BTV, labels)
        return CausalLmOutput(logits=logits_BTV, loss=loss)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Recompute every block's activations in backward; the arguments of transformers are accepted."""
        self.transformer.checkpoint_activations = True

    def _initialise(self, std: float, *, layers: int) -> None:
        for name, module in self.named_modules():
            if isinstance(module, Conv1D | nn.Linear | nn.Embedding):
                # Two residual additions per block: without this the variance of x grows with the depth.
                is_output = name.endswith("c_proj")
                nn.init.normal_(module.weight, std=std / math.sqrt(2 * layers) if is_output else std)
