"""Floating-point operations of an engine's steps and the peak of its devices, for the MFU.

The operations are those of the planner's formulas (`contract.planner.flops`). They are not known for models
with experts, of which a token meets a few, and for encoders with a decoder, whose tokens meet one of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerotrain.contract.planner import ModelFlops, peak_tflops
from zerotrain.runtime.engine import Engine

TERA = 1e12

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_WIDTH = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeWork:
    """Sizes of a model and its devices from which the operations of a step and the MFU follow."""

    model: ModelFlops | None = None
    """Sizes of the model; None = not known."""
    world_size: int = 1
    peak: float | None = None
    """Operations per second that the devices of all ranks could reach; None = not known."""

    @classmethod
    def of(cls, engine: Engine) -> ComputeWork:
        """Read it off an engine."""
        peak = _peak(engine)
        return cls(
            model=_model_flops(engine),
            world_size=engine.world_size,
            peak=None if peak is None else peak * engine.world_size,
        )

    def flops(self, *, tokens: int, samples: int) -> float:
        """Return the operations of `tokens` tokens of all ranks, of which a rank has `samples` sequences;
        0.0 where they are not known."""
        if self.model is None or not tokens or not samples:
            return 0.0
        return tokens * self.model.training(tokens / (samples * self.world_size))

    def utilisation(self, flops: float, seconds: float) -> float | None:
        """Return the part of the peak that these operations are in that time; None where it is not known."""
        if self.peak is None or not flops or not seconds:
            return None
        return flops / seconds / self.peak


def _peak(engine: Engine) -> float | None:
    """Return the operations per second that this rank's device could reach."""
    configured, dtype = engine.config.peak_tflops, engine.config.precision.product_dtype
    if configured is None and engine.device.type == "cuda":
        # Sheets give fp32 without TF32, which a program may allow.
        if dtype == "fp32" and torch.get_float32_matmul_precision() != "highest":
            return None
        configured = peak_tflops(torch.cuda.get_device_name(engine.device), dtype)
    return configured * TERA if configured else None


def _model_flops(engine: Engine) -> ModelFlops | None:
    config = _config(engine.module)
    if any(_number(config, (name,)) > 1 for name in _EXPERTS) or config.get("is_encoder_decoder"):
        return None
    layout = engine.core.layout
    multiplied = {layout.aliases.get(name, name) for name in _multiplied(engine)}
    counts = {True: 0, False: 0}
    for unit in layout.units:
        counts[unit.trainable] += sum(item.numel for item in unit.segments if item.fqn in multiplied)
    return ModelFlops(
        trained=counts[True],
        frozen=counts[False],
        attention_width=_attention_width(engine.module, config),
    )


def _multiplied(engine: Engine) -> Iterator[str]:
    """Yield the names of parameters that are not a table alone: a table may be the head, too."""
    for name, module in engine.named_modules():
        if not isinstance(module, nn.Embedding):
            for own, _ in module.named_parameters(recurse=False):
                yield f"{name}.{own}" if name else own


def _attention_width(module: nn.Module, config: Mapping[str, Any]) -> int:
    """Return layers x heads x size of a head: the model's own attribute, or by a configuration in
    transformers' words; 0 where neither says it."""
    own = getattr(module, "attention_width", None)
    if isinstance(own, int):
        return own
    layers, heads = _number(config, _LAYERS), _number(config, _HEADS)
    size = _number(config, ("head_dim",))
    return layers * (heads * size if size else _number(config, _WIDTH))


def _config(module: nn.Module) -> Mapping[str, Any]:
    """Return the model's configuration, of its text part where it has several."""
    config = getattr(module, "config", None)
    if callable(text := getattr(config, "get_text_config", None)):
        config = text()
    if callable(as_dict := getattr(config, "to_dict", None)):
        config = as_dict()
    return config if isinstance(config, Mapping) else {}


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return the first whole number of these names; 0 where there is none."""
    return next((found for name in names if type(found := config.get(name)) is int), 0)
