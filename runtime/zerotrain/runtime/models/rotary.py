"""Rotary position embeddings with the scalings of Llama 3.1 and Qwen: default, linear, llama3, yarn.

https://arxiv.org/abs/2104.09864; yarn: https://arxiv.org/abs/2309.00071.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zerotrain.runtime.models.causal_lm import UnsupportedModel


class Rotary(nn.Module):
    """Angles of every position; the frequencies are a buffer that no file holds."""

    inv_freq: torch.Tensor

    def __init__(self, head_dim: int, rope: Mapping[str, Any]) -> None:
        """`rope` is `rope_parameters` of a configuration. Raises UnsupportedModel naming its type or key."""
        super().__init__()
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if kind not in _KINDS:
            raise UnsupportedModel(
                f"rope_parameters.rope_type {kind!r} is not supported; supported are {sorted(_KINDS)}; "
                "install transformers, which has more"
            )
        try:
            frequencies, self.scale = _KINDS[kind](head_dim, rope)
        except KeyError as error:
            raise UnsupportedModel(f"rope_parameters of type {kind!r} need {error.args[0]!r}") from None
        self.register_buffer("inv_freq", frequencies, persistent=False)

    @torch.no_grad()
    def forward(self, positions_BT: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, `[batch, tokens, head_dim]`."""
        angles = positions_BT[..., None].float() * self.inv_freq.float()
        both = torch.cat((angles, angles), dim=-1)
        return (both.cos() * self.scale).to(dtype), (both.sin() * self.scale).to(dtype)


def rotate(x_BHTK: torch.Tensor, cos_BTK: torch.Tensor, sin_BTK: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + K / 2) by their angles."""
    first, second = x_BHTK.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_BHTK * cos_BTK[:, None] + turned * sin_BTK[:, None]


def _plain(head_dim: int, rope: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (float(rope["rope_theta"]) ** exponents), 1.0


def _linear(head_dim: int, rope: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    frequencies, scale = _plain(head_dim, rope)
    return frequencies / float(rope["factor"]), scale


def _llama3(head_dim: int, rope: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Return the frequencies of Llama 3.1: long waves are stretched, short ones kept, those between
    interpolated."""
    frequencies, scale = _plain(head_dim, rope)
    factor, trained = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    waves = 2 * math.pi / frequencies
    stretched = torch.where(waves > trained / low, frequencies / factor, frequencies)
    share = (trained / waves - low) / (high - low)
    mixed = (1 - share) * stretched / factor + share * stretched
    is_between = ~(waves < trained / high) & ~(waves > trained / low)
    return torch.where(is_between, mixed, stretched), scale


def _yarn(head_dim: int, rope: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    base, trained = float(rope["rope_theta"]), float(rope["original_max_position_embeddings"])
    factor = float(rope["factor"])
    scale = rope.get("attention_factor")
    if scale is None:
        over, under = rope.get("mscale"), rope.get("mscale_all_dim")
        both = bool(over and under)
        scale = _yarn_scale(factor, over) / _yarn_scale(factor, under) if both else _yarn_scale(factor, 1.0)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies, _ = _plain(head_dim, rope)
    return frequencies / factor * ramp + frequencies * (1 - ramp), float(scale)


def _yarn_scale(factor: float, weight: Any) -> float:
    return 1.0 if factor <= 1 else 0.1 * float(weight) * math.log(factor) + 1.0


_KINDS: dict[str, Callable[[int, Mapping[str, Any]], tuple[torch.Tensor, float]]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
