"""Models from folders in Hugging Face's form, with the transformers library or without it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from zerotrain.contract.config import EngineConfig
from zerotrain.contract.strict_json import MAX_MODEL_CONFIG_BYTES, read_json
from zerotrain.runtime.activation.checkpoint import checkpoint_activations
from zerotrain.runtime.construct.context import init_context
from zerotrain.runtime.models.causal_lm import UnsupportedModel, check_numbers
from zerotrain.runtime.models.decoder import Decoder
from zerotrain.runtime.models.gpt2 import Gpt2
from zerotrain.runtime.weights import WeightsError, load_weights

CONFIG = "config.json"

FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], nn.Module]] = {
    "llama": Decoder,
    "qwen2": Decoder,
    "qwen3": Decoder,
    "mistral": Decoder,
    "gpt2": Gpt2,
}
"""Builders by `model_type` of config.json, used where transformers is not installed."""

_LIBRARYS_CHECKPOINT = "_gradient_checkpointing_func"
"""Attribute that blocks of transformers call with a function and its inputs; torch's checkpointing unless
replaced."""

_folders: WeakKeyDictionary[nn.Module, Path] = WeakKeyDictionary()


class Implementation(StrEnum):
    """Implementation of the model: the library's or this project's."""

    AUTO = "auto"  # transformers where it is installed
    TRANSFORMERS = "transformers"
    OWN = "zerotrain"


def load_pretrained(
    folder: Path | str,
    config: EngineConfig | Mapping[str, Any] | Path | str | None = None,
    *,
    implementation: str = Implementation.AUTO,
    seed: int | None = None,
) -> nn.Module:
    """Return a causal language model from a folder with `config.json` and safetensors; it takes no memory
    yet.

    `initialize` reads the weights, each rank the byte ranges of its own part; `materialize` gives the whole
    model to one process. With transformers installed the model is its class (any architecture with a causal
    language model whose stored names are the model's); without it, this project's own: llama, qwen2, qwen3,
    mistral, gpt2. Both are called as `model(input_ids=ids, labels=ids).loss`.

    Args:
        folder: local; nothing is downloaded.
        config: the configuration of `initialize`, checked early; may be None.
        implementation: "auto", "transformers" or "zerotrain".
        seed: for parameters that no file holds, as in `init_context`.

    Raises WeightsError when files are missing or do not fit, UnsupportedModel when config.json requests
    something that the implementation does not have.
    """
    path, kind = Path(folder).absolute(), Implementation(implementation)
    raw = read_model_config(path)
    has_library = _has_transformers()
    if kind is Implementation.TRANSFORMERS and not has_library:
        raise UnsupportedModel(
            "implementation 'transformers' needs the transformers library; install it, or take 'zerotrain'"
        )
    with init_context(config, seed=seed):
        use_library = has_library and kind is not Implementation.OWN
        model = _by_transformers(path) if use_library else build_model(raw)
    load_weights(model, path)
    _folders[model] = path
    return model


def build_model(raw: Mapping[str, Any]) -> nn.Module:
    """Return this project's implementation of the model of a `config.json`, with fresh weights. Raises
    UnsupportedModel."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UnsupportedModel(
            f"{CONFIG}: model_type {family!r} is not one of {sorted(FAMILIES)}; install transformers, "
            "which has more"
        )
    check_numbers(raw)
    try:
        return FAMILIES[family](raw)
    except UnsupportedModel:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise UnsupportedModel(f"{CONFIG}: no {family} model can be built from it: {error}") from error


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return the folder's `config.json`. Raises WeightsError."""
    try:
        raw = read_json(folder / CONFIG, max_bytes=MAX_MODEL_CONFIG_BYTES, follow_link=True, finite=False)
    except FileNotFoundError:
        raise WeightsError(
            f"model folder {folder} has no {CONFIG}; name a local folder in Hugging Face's form"
        ) from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"model folder {folder}: {CONFIG} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise WeightsError(f"model folder {folder}: {CONFIG} must be an object; got {type(raw).__name__}")
    return raw


def recompute_activations(model: nn.Module) -> None:
    """Make all blocks of a model of `load_pretrained` use `checkpoint_activations`, the library's too.

    Raises ValueError where the library has no recomputation for the model.
    """
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the library's newer name for it
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)  # type: ignore[operator]
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]
    for part in model.modules():
        if hasattr(part, _LIBRARYS_CHECKPOINT):
            setattr(part, _LIBRARYS_CHECKPOINT, checkpoint_activations)


def folder_of(model: nn.Module) -> Path | None:
    """Return the folder from which `load_pretrained` made the model; None for other models."""
    return _folders.get(model)


def _has_transformers() -> bool:
    try:
        return importlib.util.find_spec("transformers") is not None
    except ImportError:
        return False


def _by_transformers(folder: Path) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.use_cache = False  # the cache would keep every key and value of a training step
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModel(f"model folder {folder}: transformers cannot build it: {error}") from error
    assert isinstance(model, nn.Module)
    return model
