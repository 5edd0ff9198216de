"""Models of a job's model part as an nn.Module: a GPT by size or by name, a folder in Hugging Face's form, or
the result of the user's factory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.presets import PRESETS
from zerotrain.contract.train_spec import GptSpec, ModelSpec, TrainSpec
from zerotrain.runtime.construct.context import init_context
from zerotrain.runtime.models.causal_lm import UnsupportedModel
from zerotrain.runtime.models.gpt import BYTE_VOCABULARY, Gpt
from zerotrain.runtime.models.huggingface import load_pretrained, read_model_config, recompute_activations
from zerotrain.runtime.weights import WeightsError

DEFAULT_CONTEXT = 2048
"""Tokens per sample of a model from a folder that allows more, unless the job sets the number."""


class ModelError(Exception):
    """Raised when the model cannot be built; the job's model part, or the factory, must change."""

    exit_code: ExitCode = ExitCode.BAD_MODEL


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltModel:
    """A model, and its properties that the data loader needs."""

    module: nn.Module
    context: int
    """Tokens per sample; a batch is int64 `[batch, context + 1]`."""
    vocabulary: int | None
    """Number of token ids, which run from 0; None when a factory's model does not declare it (attribute
    `vocabulary`)."""
    loss: Callable[[Callable[..., Any], torch.Tensor], torch.Tensor] = lambda call, batch: call(batch)
    """Loss function `loss(call, batch)`, where `call` is the engine."""


def build_model(spec: TrainSpec, *, checkpoint_activations: bool = False) -> BuiltModel:
    """Build the model of a job. Raises ModelError naming the field, the rule, the value and the remedy.

    A factory's model gets `checkpoint_activations` through its attribute of that name, if it has one.
    """
    model = spec.model
    if model.path is not None:
        return _from_folder(model.path, spec, checkpoint_activations=checkpoint_activations)
    if model.factory is not None:
        return _from_factory(model, spec.context, checkpoint_activations)
    sizes = model.gpt or _preset(str(model.preset))
    if spec.context is not None and spec.context > sizes.context:
        raise ModelError(f"context {spec.context} exceeds the model's {sizes.context}; lower it")
    with init_context(seed=spec.seed):
        module = Gpt(sizes, checkpoint_activations=checkpoint_activations)
    return BuiltModel(
        module=module,
        context=spec.context or sizes.context,
        vocabulary=BYTE_VOCABULARY,
    )


def _from_folder(folder: str, spec: TrainSpec, *, checkpoint_activations: bool) -> BuiltModel:
    """Return a model with weights; its call returns logits, so the loss is computed here."""
    try:
        module = load_pretrained(folder, seed=spec.seed)
        raw = read_model_config(Path(folder))
    except (WeightsError, UnsupportedModel) as error:
        raise ModelError(f"model.path {folder!r}: {error}") from error
    longest = raw.get("max_position_embeddings") or raw.get("n_positions")
    context = spec.context or min(int(longest or DEFAULT_CONTEXT), DEFAULT_CONTEXT)
    if longest is not None and context > int(longest):
        raise ModelError(
            f"context {context} exceeds the {longest} positions of the model in {folder}; lower it"
        )
    if checkpoint_activations:
        recompute_activations(module)
    vocabulary = raw.get("vocab_size")
    return BuiltModel(
        module=module,
        context=context,
        vocabulary=vocabulary if isinstance(vocabulary, int) else None,
        loss=_next_token_loss,
    )


def _next_token_loss(call: Callable[..., Any], batch: torch.Tensor) -> torch.Tensor:
    logits_BTV = call(input_ids=batch[:, :-1]).logits
    return functional.cross_entropy(logits_BTV.float().flatten(0, 1), batch[:, 1:].flatten())


def _preset(name: str) -> GptSpec:
    try:
        return PRESETS[name]
    except KeyError:
        raise ModelError(f"model.preset {name!r} is unknown; take one of {', '.join(PRESETS)}") from None


def _from_factory(model: ModelSpec, context: int | None, checkpoint_activations: bool) -> BuiltModel:
    name = str(model.factory)
    function = _resolve(name)
    try:
        module = function(**model.factory_args)
    except Exception as error:
        # Whatever the user's code raises, the job's model part is the cause; the chain shows where.
        raise ModelError(
            f"model.factory {name!r} with args {dict(model.factory_args)} failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"model.factory {name!r} must return a torch.nn.Module; got {type(module).__name__}")
    tokens = context or getattr(module, "context", None)
    if not isinstance(tokens, int) or tokens < 1:
        raise ModelError(
            f"model.factory {name!r}: the number of tokens per sample is unknown; "
            "give the module an attribute `context` (int of at least 1)"
        )
    if hasattr(module, "checkpoint_activations"):
        setattr(module, "checkpoint_activations", checkpoint_activations)  # noqa: B010 - not a tensor or module
    vocabulary = getattr(module, "vocabulary", None)
    return BuiltModel(
        module=module, context=tokens, vocabulary=vocabulary if isinstance(vocabulary, int) else None
    )


def _resolve(name: str) -> Callable[..., Any]:
    package, _, attribute = name.partition(":")
    if not package or not attribute:
        raise ModelError(f"model.factory must be `package.module:function`; got {name!r}")
    try:
        function = getattr(importlib.import_module(package), attribute)
    except ImportError as error:
        raise ModelError(
            f"model.factory {name!r}: {error}; install the package in the worker's image"
        ) from error
    except AttributeError:
        raise ModelError(f"model.factory {name!r}: module {package!r} has no {attribute!r}") from None
    if not callable(function):
        raise ModelError(f"model.factory {name!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]
