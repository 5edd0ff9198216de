"""The shape of a model from its `config.json`, for the families that the trainer builds itself.

The keys and defaults are those of `runtime/models`; tests compare the two. Only `zerotrain plan` calls it,
since the operator cannot see the workers' files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerotrain.contract.memory import ModuleSize
from zerotrain.contract.strict_json import MAX_MODEL_CONFIG_BYTES, JsonError, read_json

from .shape import Block, ModelShape, ShapeError

DEFAULT_CONTEXT = 2048
"""Tokens per sample that the trainer feeds to a model from a folder that supports more."""

MAX_LAYERS = 4096


def read_shape(path: Path, *, context: int | None = None) -> ModelShape:
    """Return the shape of a folder in Hugging Face's form, or of a `config.json`. Raises ShapeError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = read_json(file, max_bytes=MAX_MODEL_CONFIG_BYTES, follow_link=True, finite=False)
    except OSError as error:
        raise ShapeError(f"{file} cannot be read: {error.strerror}; name a model's config.json") from error
    except JsonError as error:
        raise ShapeError(f"{file} {error}; name a model's config.json") from error
    return shape_of_config(raw, source=str(file), context=context)


def shape_of_config(raw: Any, *, source: str = "config.json", context: int | None = None) -> ModelShape:
    """Return the shape that a `config.json` describes. Raises ShapeError that names the key."""
    if not isinstance(raw, Mapping):
        raise ShapeError(f"{source} must hold an object; got {type(raw).__name__}")
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise ShapeError(
            f"{source}: model_type {family!r} is not one whose sizes are known ({', '.join(_FAMILIES)}); "
            "give the number of its parameters as spec.model.parameters instead"
        )
    keys = _Keys(raw, source)
    shape = _FAMILIES[family](keys, family)
    longest = shape.context
    if context is not None and context > longest:
        raise ShapeError(f"{source}: a context of {context} exceeds the model's {longest}; lower it")
    return replace(shape, context=context or min(longest, DEFAULT_CONTEXT))


@dataclass(frozen=True, slots=True)
class _Keys:
    raw: Mapping[str, Any]
    source: str

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number.

        A missing, null or zero value gives the default, as where the model is built.
        """
        value = self.raw.get(key)
        if not value and default is not None:
            return default
        if value is None:
            raise ShapeError(f"{self.source}: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_whole(value):
            raise ShapeError(f"{self.source}: {key} must be a whole number; got {value!r}")
        if not 0 < value < 2**40:
            raise ShapeError(f"{self.source}: {key} must be positive and below 2**40; got {value}")
        return int(value)

    def layers(self, key: str) -> int:
        layers = self.size(key)
        if layers > MAX_LAYERS:
            raise ShapeError(f"{self.source}: {key} must be at most {MAX_LAYERS}; got {layers}")
        return layers

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.raw.get(key, default))

    def has_dropout(self, *keys: str, default: float) -> bool:
        return any(self.raw.get(key, default) for key in keys)


def _is_whole(value: int | float) -> bool:
    """Return whether a number is whole. JSON as Python reads it also has NaN and Infinity."""
    return isinstance(value, int) or (math.isfinite(value) and value.is_integer())


def _decoder(keys: _Keys, family: str) -> ModelShape:
    width, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    layers, vocabulary = keys.layers("num_hidden_layers"), keys.size("vocab_size")
    inner = keys.size("intermediate_size")
    kv_heads = keys.size("num_key_value_heads", 8 if family == "mistral" else heads)
    head_dim = keys.size("head_dim", 128 if family == "qwen3" else max(1, width // heads))
    attention_bias = keys.flag("attention_bias", False) and family in ("llama", "qwen3")
    block = tuple(
        _decoder_block(
            (width, heads * head_dim, kv_heads * head_dim, inner),
            qkv_bias=family == "qwen2" or attention_bias,
            out_bias=attention_bias,
            mlp_bias=keys.flag("mlp_bias", False) and family == "llama",
            head_norm=head_dim if family == "qwen3" else 0,
        )
    )
    is_tied = keys.flag("tie_word_embeddings", False)
    head = () if is_tied else (ModuleSize(name="lm_head", parameters=(vocabulary * width,)),)
    return ModelShape(
        source=f"{family} of {keys.source}",
        modules=(
            ModuleSize(name="model.embed_tokens", parameters=(vocabulary * width,), is_tied=is_tied),
            *(ModuleSize(name=f"model.layers.{index}", parameters=block) for index in range(layers)),
            ModuleSize(name="model.norm", parameters=(width,)),
            *head,
        ),
        block=Block.GATED,
        width=width,
        inner=inner,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        context=keys.size("max_position_embeddings", 2048),
        is_tied=is_tied,
        head_norms=family == "qwen3",
    )


def _decoder_block(
    sizes: tuple[int, int, int, int], *, qkv_bias: bool, out_bias: bool, mlp_bias: bool, head_norm: int
) -> Iterator[int]:
    """Yield the elements of a layer's parameters in the module's order."""
    width, queries, keys, inner = sizes
    for out in (queries, keys, keys):
        yield out * width
        if qkv_bias:
            yield out
    yield width * queries
    if out_bias:
        yield width
    if head_norm:
        yield head_norm
        yield head_norm
    for out, into in ((inner, width), (inner, width), (width, inner)):
        yield out * into
        if mlp_bias:
            yield out
    yield width
    yield width


def _gpt2(keys: _Keys, family: str) -> ModelShape:
    width, heads, layers = keys.size("n_embd"), keys.size("n_head"), keys.layers("n_layer")
    vocabulary, positions = keys.size("vocab_size"), keys.size("n_positions")
    inner = keys.size("n_inner", 4 * width)
    block = (
        *(width, width),
        *(3 * width * width, 3 * width, width * width, width),
        *(width, width),
        *(width * inner, inner, inner * width, width),
    )
    is_tied = keys.flag("tie_word_embeddings", True)
    head = () if is_tied else (ModuleSize(name="lm_head", parameters=(vocabulary * width,)),)
    return ModelShape(
        source=f"{family} of {keys.source}",
        modules=(
            ModuleSize(name="transformer.wte", parameters=(vocabulary * width,), is_tied=is_tied),
            ModuleSize(name="transformer.wpe", parameters=(positions * width,)),
            *(ModuleSize(name=f"transformer.h.{index}", parameters=block) for index in range(layers)),
            ModuleSize(name="transformer.ln_f", parameters=(width, width)),
            *head,
        ),
        block=Block.GPT,
        width=width,
        inner=inner,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=max(1, width // heads),
        vocabulary=vocabulary,
        context=positions,
        is_tied=is_tied,
        has_dropout=keys.has_dropout("resid_pdrop", "embd_pdrop", default=0.1),
    )


_FAMILIES: Mapping[str, Callable[[_Keys, str], ModelShape]] = {
    "llama": _decoder,
    "qwen2": _decoder,
    "qwen3": _decoder,
    "mistral": _decoder,
    "gpt2": _gpt2,
}
