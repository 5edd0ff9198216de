"""Fine-tuning without a script: what `spec.finetune` asks for, as the ranks read it.

The operator renders it from `spec` into the Secret of an attempt; `zerotrain run` writes the same file.
Stage, precision and offload are in the DeepSpeed-style configuration beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from zerotrain.contract.json_fields import checked_fields
from zerotrain.contract.strict_json import JsonError, strict_json

FINETUNE_FILE: Final = "finetune.json"
"""Name of the file, beside the configuration."""

PROGRAM: Final = ("zerotrain", "launch", "-m", "zerotrain.compat.finetune")
"""Command of a job with `spec.finetune`: a module of ours, run as any script of `zerotrain launch` is."""

METHODS: Final = ("full", "lora")
QLORA: Final = "qlora"
QLORA_REFUSAL: Final = (
    "qlora is not possible: quantised base weights cannot be sharded by this engine; take lora, whose base "
    "weights are sharded in bf16 by zero_optimization.stage 3, and offload_param where that is too much"
)


class FinetuneSpecError(ValueError):
    """The fine-tuning part is wrong (exit code BAD_CONFIG); the message begins with the field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSpec:
    """Adapters of low rank beside frozen weights."""

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    """Last parts of the names of the modules that get an adapter; empty = every linear layer but the head."""

    def __post_init__(self) -> None:
        _at_least("lora.rank", self.rank, 1)
        _at_least("lora.alpha", self.alpha, 1)
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise FinetuneSpecError(f"lora.dropout must be at least 0 and below 1; got {self.dropout!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSpec:
    """Rows that are evaluated every few steps. Exactly one of share and data is set."""

    every_steps: int
    share: float | None = None
    """Part of the training rows that is held back, above 0 and below 1."""
    data: str | None = None

    def __post_init__(self) -> None:
        _at_least("eval.every_steps", self.every_steps, 1)
        if (self.share is None) == (self.data is None):
            raise FinetuneSpecError(
                f"eval needs exactly one of share and data; got {self.share!r} and {self.data!r}"
            )
        if self.share is not None and (not _is_number(self.share) or not 0 < self.share < 1):
            raise FinetuneSpecError(f"eval.share must be above 0 and below 1; got {self.share!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStoppingSpec:
    """End of the training when the loss of the evaluation no longer falls."""

    patience: int
    """Number of evaluations in a row that may bring nothing."""
    threshold: float = 0.0
    """Least fall of the loss that counts."""

    def __post_init__(self) -> None:
        _at_least("early_stopping.patience", self.patience, 1)
        if not _is_number(self.threshold) or self.threshold < 0:
            raise FinetuneSpecError(f"early_stopping.threshold must be at least 0; got {self.threshold!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneSpec:
    """Settings of a fine-tuning beyond the engine's configuration."""

    model: str
    """Folder in Hugging Face format (absolute path), or name on the hub."""
    method: str
    data: str
    """File or folder in the worker (absolute path), or name on the hub."""
    learning_rate: float
    batch_size: int
    """Sequences of a rank in a micro-batch."""
    accumulation_steps: int = 1
    max_length: int
    """[T] Longest sequence in tokens; what is longer is cut."""
    steps: int | None = None
    epochs: float | None = None
    """Passes over the data. Exactly one of steps and epochs is set."""
    output: str = "output"
    """Folder below the one in which the ranks start."""
    lora: LoraSpec = field(default_factory=LoraSpec)
    chat_template: str | None = None
    """Jinja text, or the absolute path of a file with it; None = the tokenizer's own."""
    packing: bool = False
    completion_only: bool | None = None
    """Whether only completions count in the loss; None = where the rows have completions."""
    eval: EvaluationSpec | None = None
    early_stopping: EarlyStoppingSpec | None = None
    seed: int = 0
    log_every_steps: int = 10
    save_every_steps: int | None = None
    """Steps between two checkpoints: a multiple of eval.every_steps, which the operator checks where the user
    gives it (spec.checkpoint); None = at each evaluation."""
    keep_last: int = 3

    def __post_init__(self) -> None:
        if self.method == QLORA:
            raise FinetuneSpecError(f"method: {QLORA_REFUSAL}")
        if self.method not in METHODS:
            raise FinetuneSpecError(f"method must be one of {', '.join(METHODS)}; got {self.method!r}")
        if (self.steps is None) == (self.epochs is None):
            raise FinetuneSpecError(
                f"steps or epochs must be given, and not both; got {self.steps!r} and {self.epochs!r}"
            )
        for name in ("batch_size", "accumulation_steps", "log_every_steps", "keep_last"):
            _at_least(name, getattr(self, name), 1)
        _at_least("max_length", self.max_length, 2)
        for name in ("steps", "save_every_steps"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("learning_rate", "epochs"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or value <= 0):
                raise FinetuneSpecError(f"{name} must be a number above 0; got {value!r}")
        if self.eval is None and self.early_stopping is not None:
            raise FinetuneSpecError("early_stopping needs eval, whose loss it watches; add eval")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> FinetuneSpec:
        """Parse the JSON. Raises FinetuneSpecError that names the unknown, missing or wrong key."""
        try:
            data = strict_json(text)
        except JsonError as error:
            raise FinetuneSpecError(f"{FINETUNE_FILE} {error}") from error
        values = _checked(cls, data, "")
        for name, part in _PARTS.items():
            if values.get(name) is not None:
                values[name] = part(**_checked(part, values[name], f"{name}."))
        return cls(**values)


_PARTS: Mapping[str, type] = {
    "lora": LoraSpec,
    "eval": EvaluationSpec,
    "early_stopping": EarlyStoppingSpec,
}


def _checked(cls: type, data: Any, path: str) -> dict[str, Any]:
    """Return the values of an object of this class, lists as tuples."""
    values = checked_fields(cls, data, path, file=FINETUNE_FILE, error=FinetuneSpecError)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise FinetuneSpecError(f"{name} must be a whole number of at least {least}; got {value!r}")
