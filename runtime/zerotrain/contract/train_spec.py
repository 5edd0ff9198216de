"""The training part of a job, as the trainer reads it.

The operator renders it from `spec` into the Secret of an attempt; `zerotrain run` writes the same file. It
holds the settings that the DeepSpeed-style configuration lacks: model, data, steps, checkpoint policy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from zerotrain.contract.json_fields import checked_fields
from zerotrain.contract.strict_json import JsonError, strict_json

CONFIG_FILE = "ds_config.json"
TRAIN_SPEC_FILE = "train.json"

PYTHON_STDLIB = "builtin:python-stdlib"
"""Value of `data_path` for the text of the worker's own Python standard library."""


class TrainSpecError(ValueError):
    """The training part is wrong (exit code BAD_CONFIG)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GptSpec:
    """A byte-level GPT: pre-norm blocks, learned positions, vocabulary of 256 bytes, tied head."""

    d_model: int
    layers: int
    heads: int
    context: int
    """Tokens per sample."""

    def __post_init__(self) -> None:
        for name in ("d_model", "layers", "heads", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise TrainSpecError(f"model.gpt.{name} must be a whole number of at least 1; got {value!r}")
        if self.d_model % self.heads:
            raise TrainSpecError(
                f"model.gpt.d_model {self.d_model} is not a multiple of heads {self.heads}; "
                f"take {self.d_model // self.heads * self.heads or self.heads}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Choice of the model. Exactly one of gpt, preset, factory and path is set."""

    gpt: GptSpec | None = None
    preset: str | None = None
    factory: str | None = None
    """Function as `package.module:function`, which is called with `factory_args`.

    It returns an nn.Module whose call on a batch of token ids (int64, [batch, context + 1]) returns the loss.
    """
    path: str | None = None
    """Folder in Hugging Face format."""
    factory_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = [name for name in ("gpt", "preset", "factory", "path") if getattr(self, name) is not None]
        if len(given) != 1:
            raise TrainSpecError(
                f"model needs exactly one of gpt, preset, factory, path; got {given or 'none'}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPolicy:
    """Times of checkpoints, and which of them to keep. The folder itself is LaunchSpec.checkpoint_dir."""

    every_steps: int | None = None
    every_seconds: float | None = None
    keep_last: int = 3
    on_termination: bool = True
    """Whether to save when all ranks stop on request."""
    resume_from: str = "Latest"
    """Checkpoint to resume from: `Latest`, `None` (start without one), or the name of a step folder."""
    asynchronous: bool | None = None
    """Whether to write periodic checkpoints in the background.

    This takes host memory for a copy of the state. The trainer waits for the last one. None = as the engine's
    configuration (`checkpoint.writer.decoupled`).
    """

    def __post_init__(self) -> None:
        _check_count("checkpoint.keep_last", self.keep_last)
        if self.every_steps is not None:
            _check_count("checkpoint.every_steps", self.every_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSpec:
    """Settings of the built-in trainer beyond the engine's configuration."""

    model: ModelSpec
    data_path: str
    """File or folder of text in the worker, or PYTHON_STDLIB."""
    steps: int
    """Optimizer steps of the whole job, over all attempts."""
    seed: int = 0
    log_every_steps: int = 10
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    context: int | None = None
    """Tokens per sample for a `factory` model or one from a folder.

    The default is 2048, or the model's longest if shorter. A GPT uses its own context.
    """

    def __post_init__(self) -> None:
        _check_count("steps", self.steps)
        _check_count("log_every_steps", self.log_every_steps)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TrainSpec:
        """Parse the JSON. Raises TrainSpecError that names the unknown, missing or wrong key."""
        try:
            data = strict_json(text)
        except JsonError as error:
            raise TrainSpecError(f"{TRAIN_SPEC_FILE} {error}") from error
        values = _checked(cls, data, "")
        model = _checked(ModelSpec, values["model"], "model.")
        if model.get("gpt") is not None:
            model["gpt"] = GptSpec(**_checked(GptSpec, model["gpt"], "model.gpt."))
        values["model"] = ModelSpec(**model)
        checkpoint = _checked(CheckpointPolicy, values.get("checkpoint", {}), "checkpoint.")
        values["checkpoint"] = CheckpointPolicy(**checkpoint)
        return cls(**values)


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TrainSpecError(f"{name} must be a whole number; got {value!r}")
    if value < 1:
        raise TrainSpecError(f"{name} must be at least 1; got {value}")


def _checked(cls: type, data: Any, path: str) -> dict[str, Any]:
    return checked_fields(cls, data, path, file=TRAIN_SPEC_FILE, error=TrainSpecError)
