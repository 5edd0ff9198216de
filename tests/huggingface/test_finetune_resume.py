"""A fine-tuning that was killed and resumed equals one that was not, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import hf_assets
from tests.support.hf_cases import OWN, write_config
from tests.support.hf_jobs import run_attempt
from tests.support.hf_scripts import Losses, ScriptFailed
from tests.support.instruction_pairs import write_pairs

pytestmark = pytest.mark.ranks

METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    # Dropout draws from the generators, whose states must be resumed, too.
    "lora": {"method": "lora", "lora": {"rank": 4, "dropout": 0.2, "targets": ["q_proj", "v_proj"]}},
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    hf_assets.save_models(folder / "models")
    write_pairs(folder / "pairs.jsonl", 40)
    return folder


def attempt(assets: Path, folder: Path, number: int, method: str, kill_point: str = "") -> list[Losses]:
    """Run an attempt of a fine-tuning of four steps on two ranks, with a checkpoint every two."""
    folder.mkdir(exist_ok=True)
    (folder / "finetune.json").write_text(
        json.dumps(
            {
                "model": str(assets / "models" / "causal"),
                "data": str(assets / "pairs.jsonl"),
                "learning_rate": 5e-3,
                "batch_size": 2,
                "accumulation_steps": 2,
                "max_length": 64,
                "steps": 4,
                "log_every_steps": 1,
                "save_every_steps": 2,
                "eval": {"share": 0.25, "every_steps": 2},
                "early_stopping": {"patience": 3},
                **METHODS[method],
            }
        )
    )
    config = write_config(folder, "3")
    given = (str(folder / "finetune.json"), "--deepspeed", str(config))
    environment = {"KILL_POINT": kill_point} if kill_point else None
    return run_attempt(folder, number, OWN / "finetune.py", *given, environment=environment)


def results(folder: Path) -> dict[str, bytes]:
    """Return the weights of the result by file."""
    return {
        file.name: file.read_bytes() for file in (folder / "job/script/output/final").glob("*.safetensors")
    }


@pytest.mark.slow(
    cheaper="tests/huggingface/test_job_saves.py::"
    "test_another_number_of_ranks_sees_the_same_samples_in_each_step"
)
@pytest.mark.parametrize("method", METHODS)
def test_a_killed_fine_tuning_ends_as_one_that_was_not(assets: Path, tmp_path: Path, method: str) -> None:
    whole = attempt(assets, tmp_path / "whole", 1, method)
    with pytest.raises(ScriptFailed):
        attempt(assets, tmp_path / "killed", 1, method, kill_point="0:4:zerotrain.json")
    output = tmp_path / "killed" / "job" / "script" / "output"
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-2"]
    again = attempt(assets, tmp_path / "killed", 2, method)
    assert {key: len(values) for key, values in again[0].logged.items()} == {
        "loss": 2, "learning_rate": 2, "grad_norm": 2, "eval_loss": 1
    }  # fmt: skip
    for mine, theirs in zip(again, whole, strict=True):
        assert mine.losses == theirs.losses[-len(mine.losses) :]
        assert len(mine.losses) == len(theirs.losses) / 2 == 4, "of two micro-batches in each step"
        for key, values in mine.logged.items():
            assert values == theirs.logged[key][-len(values) :], key
    assert results(tmp_path / "killed") == results(tmp_path / "whole") != {}
