"""Common parts of this project's implementations of Hugging Face's causal language models: outputs, loss,
masks, norms.

They exist for workers without the transformers library. Names and shapes of parameters are the library's, so
that the same folders load here and saved folders load there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

IGNORED_LABEL = -100
"""Label of positions that do not count in the loss."""


class UnsupportedModel(ValueError):
    """Raised when a model's configuration requests something that the implementation does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalLmOutput:
    """Outputs of a model; the fields are named as in transformers."""

    logits: torch.Tensor
    """`[batch, tokens, vocabulary]`."""
    loss: torch.Tensor | None = None
    """Mean next-token cross entropy in fp32, when labels were given."""


_SIZES = frozenset(
    (
        *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings"),
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "sliding_window"),
        *("n_embd", "n_head", "n_layer", "n_positions", "n_inner", "factor", "rope_theta"),
        *("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        *("beta_fast", "beta_slow"),
    )
)
"""Numbers of a `config.json`, at any depth, that must be positive."""


def check_numbers(raw: Mapping[str, Any], prefix: str = "") -> None:
    """Raise UnsupportedModel for a number of a `config.json` that is not finite, or not positive where it
    must be."""
    for key, value in raw.items():
        if isinstance(value, Mapping) and len(prefix) < 200:
            check_numbers(value, f"{prefix}{key}.")
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not math.isfinite(value) or abs(value) > 2**62:
            raise UnsupportedModel(f"config.json: {prefix}{key} must be a finite number; got {value}")
        if key in _SIZES and value <= 0:
            raise UnsupportedModel(f"config.json: {prefix}{key} must be positive; got {value}")


def next_token_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of `labels[:, 1:]` given the logits before them, in fp32."""
    scores = logits_BTV[:, :-1].float().flatten(0, 1)
    return functional.cross_entropy(scores, labels_BT[:, 1:].flatten(), ignore_index=IGNORED_LABEL)


def attention_allowed(
    tokens: int, *, window: int | None, padding_BT: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """Return the boolean mask of the keys that each query may see, for `scaled_dot_product_attention`; None =
    plainly causal.

    With `window`, a query sees itself and the `window - 1` tokens before it. `padding_BT` is 0 for tokens
    that no query sees.
    """
    if padding_BT is None and (window is None or tokens <= window):
        return None
    query, key = torch.arange(tokens, device=device)[:, None], torch.arange(tokens, device=device)[None, :]
    allowed = key <= query
    if window is not None:
        allowed = allowed & (query - key < window)
    if padding_BT is None:
        return allowed
    # A leading padding token sees nothing; without itself its softmax would be 0 / 0.
    itself = torch.eye(tokens, dtype=torch.bool, device=device)
    return (allowed & padding_BT.bool()[:, None, None, :]) | itself


class RmsNorm(nn.Module):
    """x / rms(x), times a weight; computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        output: torch.Tensor = self.weight * normed.to(x.dtype)
        return output


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation of that name in transformers. Raises UnsupportedModel."""
    try:
        return _ACTIVATIONS[name]
    except KeyError:
        raise UnsupportedModel(f"activation {name!r} is unknown; known are {sorted(_ACTIVATIONS)}") from None


def initialise_normal(model: nn.Module, std: float) -> None:
    """Initialise linear and embedding weights from a normal distribution, and biases with zero, as these
    models require."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
