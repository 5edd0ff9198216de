"""Llama, Qwen2, Qwen3 and Mistral: one decoder, configured by their `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zerotrain.runtime.activation.checkpoint import checkpoint_activations
from zerotrain.runtime.models.causal_lm import (
    CausalLmOutput,
    RmsNorm,
    UnsupportedModel,
    activation,
    attention_allowed,
    initialise_normal,
    next_token_loss,
)
from zerotrain.runtime.models.rotary import Rotary, rotate


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes and switches of a decoder; `parse` shows the differences between the families."""

    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    norm_eps: float
    activation: str
    rope: Mapping[str, Any]
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_norms: bool
    """Whether queries and keys are normed per head (Qwen3)."""
    windows: tuple[int | None, ...]
    """Number of tokens that a query sees, per layer; None = all before it."""
    dropout: float
    tied: bool
    init_std: float

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Return the configuration of a `config.json`. Raises UnsupportedModel naming the key."""
        family = str(raw.get("model_type"))
        try:
            width, heads, layers = (
                int(raw[key]) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
            )
            vocabulary, inner = int(raw["vocab_size"]), int(raw["intermediate_size"])
        except (KeyError, TypeError) as error:
            raise UnsupportedModel(f"config.json of a {family} model needs {error}") from None
        head_dim = raw.get("head_dim") or (128 if family == "qwen3" else width // heads)
        attention_bias = bool(raw.get("attention_bias", False)) and family in ("llama", "qwen3")
        return cls(
            vocabulary=vocabulary,
            width=width,
            inner=inner,
            layers=layers,
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or (8 if family == "mistral" else heads)),
            head_dim=int(head_dim),
            context=int(raw.get("max_position_embeddings") or 2048),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            activation=str(raw.get("hidden_act", "silu")),
            rope=_rope(raw),
            qkv_bias=family == "qwen2" or attention_bias,
            out_bias=attention_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
            head_norms=family == "qwen3",
            windows=_windows(raw, family, layers),
            dropout=float(raw.get("attention_dropout") or 0.0),
            tied=bool(raw.get("tie_word_embeddings", False)),
            init_std=float(raw.get("initializer_range", 0.02)),
        )


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    context = raw.get("max_position_embeddings") or 2048
    return {
        "rope_theta": raw.get("rope_theta") or 10000.0,
        "original_max_position_embeddings": context,
        **{key: value for key, value in scaling.items() if value is not None},
    }


def _windows(raw: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    if family == "mistral":
        window = raw.get("sliding_window", 4096)
        return (int(window) if window else None,) * layers
    if family == "llama" or not raw.get("use_sliding_window", False):
        return (None,) * layers
    window = int(raw.get("sliding_window") or 4096)
    first = int(raw.get("max_window_layers", 28))
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    kinds = raw.get("layer_types") or default
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(
            f"layer_types {kinds!r} must name full or sliding attention for {layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


class Attention(nn.Module):
    """Causal attention with rotary positions; several query heads share a key and value head."""

    def __init__(self, config: DecoderConfig, window: int | None) -> None:
        super().__init__()
        size = config.head_dim
        self.config = config
        self.window = window
        self.q_proj = nn.Linear(config.width, config.heads * size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.width, config.kv_heads * size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.width, config.kv_heads * size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * size, config.width, bias=config.out_bias)
        if config.head_norms:
            self.q_norm = RmsNorm(size, config.norm_eps)
            self.k_norm = RmsNorm(size, config.norm_eps)

    def forward(
        self, x_BTD: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], padding_BT: torch.Tensor | None
    ) -> torch.Tensor:
        config, (batch, tokens, _) = self.config, x_BTD.shape
        q_BTHK, k_BTHK, v_BTHK = (
            projection(x_BTD).view(batch, tokens, -1, config.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if config.head_norms:
            q_BTHK, k_BTHK = self.q_norm(q_BTHK), self.k_norm(k_BTHK)
        q_BHTK, k_BHTK, v_BHTK = (part.transpose(1, 2) for part in (q_BTHK, k_BTHK, v_BTHK))
        allowed = attention_allowed(tokens, window=self.window, padding_BT=padding_BT, device=x_BTD.device)
        mixed_BHTK = functional.scaled_dot_product_attention(
            rotate(q_BHTK, *angles),
            rotate(k_BHTK, *angles),
            v_BHTK,
            attn_mask=allowed,
            dropout_p=config.dropout if self.training else 0.0,
            is_causal=allowed is None,
            enable_gqa=config.heads != config.kv_heads,
        )
        output: torch.Tensor = self.o_proj(mixed_BHTK.transpose(1, 2).reshape(batch, tokens, -1))
        return output


class Mlp(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.width, config.inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.inner, config.width, bias=config.mlp_bias)
        self.activation = activation(config.activation)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(self.activation(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return output


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, window: int | None) -> None:
        super().__init__()
        self.self_attn = Attention(config, window)
        self.mlp = Mlp(config)
        self.input_layernorm = RmsNorm(config.width, config.norm_eps)
        self.post_attention_layernorm = RmsNorm(config.width, config.norm_eps)

    def forward(
        self, x_BTD: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], padding_BT: torch.Tensor | None
    ) -> torch.Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), angles, padding_BT)
        output: torch.Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return output


class Body(nn.Module):
    """The layers below the head; `model.` in the names of the files."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config, window) for window in config.windows)
        self.norm = RmsNorm(config.width, config.norm_eps)
        self.rotary_emb = Rotary(config.head_dim, config.rope)
        self.checkpoint_activations = False

    def forward(self, ids_BT: torch.Tensor, padding_BT: torch.Tensor | None) -> torch.Tensor:
        x_BTD = self.embed_tokens(ids_BT)
        positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]
        angles = self.rotary_emb(positions_BT, x_BTD.dtype)
        for layer in self.layers:
            # Bound, because only x belongs to one layer; the other inputs exist once, for all layers.
            run = partial(layer, angles=angles, padding_BT=padding_BT)
            x_BTD = checkpoint_activations(run, x_BTD) if self.checkpoint_activations else run(x_BTD)
        output: torch.Tensor = self.norm(x_BTD)
        return output


class Decoder(nn.Module):
    """Causal language model: `model(input_ids, labels=input_ids).loss`, as in transformers."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        """`raw` is a `config.json`. Raises UnsupportedModel."""
        super().__init__()
        sizes = DecoderConfig.parse(raw)
        self.model = Body(sizes)
        self.lm_head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.context, self.vocabulary = sizes.context, sizes.vocabulary
        self.attention_width = len(sizes.windows) * sizes.heads * sizes.head_dim
        initialise_normal(self, sizes.init_std)
        if sizes.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> CausalLmOutput:
        """Run the model. Ids, mask (1 = a token, 0 = padding) and labels are `[batch, tokens]`."""
        logits_BTV = self.lm_head(self.model(input_ids, attention_mask))
        loss = None if labels is None else next_token_loss(logits_BTV, labels)
        return CausalLmOutput(logits=logits_BTV, loss=loss)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Recompute every layer's activations in backward; the arguments of transformers are accepted."""
        self.model.checkpoint_activations = True
