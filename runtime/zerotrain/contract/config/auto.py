"""Values for `"auto"`, by the rules of Hugging Face's Trainer.

The caller that knows the model and the training arguments passes an `AutoValues`. A field that is None falls
back to the key's default, with a notice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoValues:
    """Values that the training program knows; None for those that it does not."""

    hidden_size: int | None = None
    """Width of the model in elements (the largest one if there are several)."""

    train_batch_size: int | None = None
    """Samples per optimizer step over all ranks."""

    micro_batch_size: int | None = None
    """Samples per forward pass and rank."""

    gradient_accumulation_steps: int | None = None
    """Forward passes per optimizer step."""

    learning_rate: float | None = None
    """Base (and highest) learning rate."""

    betas: tuple[float, float] | None = None
    """Decay rates of Adam's moments."""

    eps: float | None = None
    """Adam's epsilon."""

    weight_decay: float | None = None

    max_grad_norm: float | None = None
    """Largest global gradient norm."""

    warmup_steps: int | None = None
    """Steps of the learning rate's rise."""

    total_steps: int | None = None
    """Optimizer steps of the whole training."""

    bf16: bool | None = None
    """Whether to train in bf16."""

    fp16: bool | None = None
    """Whether to train in fp16."""


Rule = Callable[[AutoValues], Any]


def _field(name: str) -> tuple[str, Rule]:
    return name, lambda values: getattr(values, name)


def _of_hidden_size(formula: Callable[[int], int]) -> tuple[str, Rule]:
    return "hidden_size", lambda values: None if values.hidden_size is None else formula(values.hidden_size)


def _betas(values: AutoValues) -> list[float] | None:
    return None if values.betas is None else list(values.betas)


RULES: Mapping[str, tuple[str, Rule]] = {
    # No key takes the width as it is.
    **{item.name: _field(item.name) for item in fields(AutoValues) if item.name != "hidden_size"},
    "betas": ("betas", _betas),
    "warmup_min_lr": ("learning_rate", lambda values: None if values.learning_rate is None else 0.0),
    "reduce_bucket_size": _of_hidden_size(lambda hidden: hidden * hidden),
    "prefetch_bucket_size": _of_hidden_size(lambda hidden: 9 * hidden * hidden // 10),
    "param_persistence_threshold": _of_hidden_size(lambda hidden: 10 * hidden),
}
"""Rules by their name in the table, each as a required AutoValues field and a function.

The function returns None if it cannot compute a value.
"""
