"""The fine-tuning part survives its file, and a wrong one is refused with the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zerotrain.contract.finetune_spec import (
    EarlyStoppingSpec,
    EvaluationSpec,
    FinetuneSpec,
    FinetuneSpecError,
    LoraSpec,
)

pytestmark = pytest.mark.unit

GOOD: dict[str, Any] = {
    "model": "/models/a",
    "method": "lora",
    "data": "/data/a.jsonl",
    "learning_rate": 1e-4,
    "batch_size": 2,
    "max_length": 128,
    "steps": 10,
    "save_every_steps": 20,
    "eval": {"every_steps": 10, "share": 0.1},
}


def test_a_part_is_read_as_it_was_written() -> None:
    spec = FinetuneSpec(
        **{**GOOD, "eval": EvaluationSpec(every_steps=10, share=0.1)},
        lora=LoraSpec(rank=4, targets=("q_proj",)),
        early_stopping=EarlyStoppingSpec(patience=2),
    )
    assert FinetuneSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "qlora"}, "method: qlora is not possible: quantised base weights cannot be sharded"),
        ({"method": "dora"}, "method must be one of full, lora; got 'dora'"),
        ({"epochs": 2}, "steps or epochs must be given, and not both; got 10 and 2"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1; got 0"),
        ({"learning_rate": -1}, "learning_rate must be a number above 0; got -1"),
        ({"lora": {"rank": "8"}}, "lora.rank must be a whole number of at least 1; got '8'"),
        ({"lora": {"dropout": 1}}, "lora.dropout must be at least 0 and below 1; got 1"),
        ({"eval": {"every_steps": 10}}, "eval needs exactly one of share and data"),
        ({"eval": {"share": 0.1}}, "eval.every_steps is missing"),
        ({"eval": None, "early_stopping": {"patience": 1}}, "early_stopping needs eval"),
        ({"modell": "a"}, "modell is not a key here"),
        ({"eval": 3}, "eval must be an object; got int"),
    ],
    ids=str,
)
def test_a_wrong_part_is_refused_with_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FinetuneSpecError) as refused:
        FinetuneSpec.from_json(json.dumps(GOOD | changes))
    assert str(refused.value).startswith(message)
