"""Fine-tuning of a language model without a script of the user's."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from zerotrain.contract.finetune_spec import QLORA_REFUSAL

from .base import SET, ApiModel, Bool, Int, Number, one_of, rule
from .core.environment import KeySelector
from .paths import PART, RelativePath

_HUB_NAME = "[A-Za-z0-9][-A-Za-z0-9_.]*(/[A-Za-z0-9][-A-Za-z0-9_.]*)?"

Source = Annotated[
    str, StringConstraints(min_length=1, max_length=1024, pattern=rf"^((/{PART})+/?|{_HUB_NAME})$")
]
"""Absolute path in the worker, or name on the hub."""


class Method(StrEnum):
    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"
    """Known only to be refused with the reason."""


class Lora(ApiModel):
    """Adapters of low rank beside frozen weights."""

    rank: Annotated[Int, Field(ge=1, le=4096)] = 16
    """Rank of the adapters, 1 to 4096; 16 unless given."""

    alpha: Annotated[Int, Field(ge=1, le=65536)] = 32
    """Scale of the adapters, divided by rank; 32 unless given."""

    dropout: Annotated[Number, Field(ge=0, le=0.9)] = 0.0
    """Dropout before the adapters, 0 to 0.9; 0 unless given."""

    targets: Annotated[
        tuple[Annotated[str, StringConstraints(min_length=1, max_length=256)], ...],
        Field(max_length=64, json_schema_extra=SET),
    ] = ()
    """Names of the layers that get an adapter, such as q_proj; every linear layer but the head unless
    given."""


class Evaluation(ApiModel):
    """Rows that are evaluated every few steps; exactly one of share, data."""

    RULES = (one_of("share", "data"),)

    every_steps: Annotated[Int, Field(ge=1, le=10**9)]
    """Steps between two evaluations. checkpoint.everySteps must be a multiple of it."""

    share: Annotated[Number, Field(ge=0.0001, le=0.9)] | None = None
    """Part of the training rows that is held back, 0.0001 to 0.9."""

    data: Source | None = None
    """Rows of their own: the same forms as finetune.data."""


class EarlyStopping(ApiModel):
    """End of the training when the loss of the evaluation no longer falls."""

    patience: Annotated[Int, Field(ge=1, le=1000)]
    """Number of evaluations in a row that may bring nothing, 1 to 1000."""

    threshold: Annotated[Number, Field(ge=0)] = 0.0
    """Least fall of the loss that counts; 0 unless given."""


class Finetune(ApiModel):
    """Fine-tuning by TRL and PEFT, which the image must hold. Stage, precision and offload are in the
    configuration; the batch sizes there are auto."""

    RULES = (
        rule(
            "self.method != 'qlora'",
            QLORA_REFUSAL,
            holds=lambda self: self.method is not Method.QLORA,
            field_path=".method",
        ),
        rule(
            "self.learningRate > 0.0",
            "learningRate must be above 0",
            holds=lambda self: self.learning_rate > 0,
            field_path=".learningRate",
        ),
        rule(
            "self.method == 'lora' || !has(self.lora)",
            "lora needs method lora; remove it or change method",
            holds=lambda self: self.method is Method.LORA or self.lora is None,
            field_path=".lora",
        ),
        rule(
            "!has(self.earlyStopping) || has(self.eval)",
            "earlyStopping needs eval, whose loss it watches; add eval",
            holds=lambda self: self.early_stopping is None or self.eval is not None,
            field_path=".earlyStopping",
        ),
    )

    model: Source
    """Folder in the worker with a model in Hugging Face format and its tokenizer, as an absolute path; or
    name on the hub, where the network allows it."""

    method: Method
    """Weights that are trained: full (all) or lora (adapters). qlora is refused."""

    lora: Lora | None = None
    """Size and place of the adapters of method lora."""

    data: Source
    """File or folder of JSONL or Parquet, or folder of datasets' save_to_disk, as an absolute path in the
    worker; or name on the hub, where the network allows it. Rows have prompt and completion, or messages, or
    text."""

    token_from: KeySelector | None = None
    """Key of a Secret with the token for the hub."""

    eval: Evaluation | None = None
    """Evaluation during the training. With it, the checkpoint of the lowest loss is kept and becomes the
    result. None unless given."""

    early_stopping: EarlyStopping | None = None
    """End before the last step. None unless given."""

    chat_template: Annotated[str, StringConstraints(min_length=1, max_length=65536)] | None = None
    """Jinja text, or absolute path of a file with it in the worker; the tokenizer's own unless given."""

    packing: Bool = False
    """Whether short rows share a sequence; false unless given."""

    completion_only: Bool | None = None
    """Whether only completions, or the assistant's messages, count in the loss; true for rows with prompt and
    completion, else false, unless given."""

    epochs: Annotated[Number, Field(ge=0.0001, le=100_000)] | None = None
    """Passes over the data, 0.0001 to 100000. Either this or spec.steps."""

    learning_rate: Annotated[Number, Field(ge=0, le=1000)]
    """Highest learning rate, above 0, at most 1000. It falls linearly to 0, unless the configuration has a
    scheduler."""

    batch_size: Annotated[Int, Field(ge=1, le=65536)]
    """Sequences of a rank in a micro-batch, 1 to 65536."""

    accumulation_steps: Annotated[Int, Field(ge=1, le=65536)] = 1
    """Micro-batches of an optimizer step, 1 to 65536; 1 unless given."""

    max_length: Annotated[Int, Field(ge=2, le=1_048_576)]
    """Longest sequence in tokens; what is longer is cut. 2 to 1048576."""

    output: RelativePath = "output"
    """Folder of checkpoints and result, below script in the job's folder of the checkpoint volume; output
    unless given. Its folder final is the result."""

    parameters: Annotated[Int, Field(ge=1, le=10**15)] | None = None
    """Number of parameters of the model, 1 to 10^15, for the memory planner: the operator does not see its
    files."""
