"""A fine-tuning without a script trains as TRL's SFTTrainer does under DDP, on the tokens and for the steps
that it names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import hf_assets
from tests.support.hf_cases import OWN, write_config
from tests.support.hf_jobs import finish_finetune
from tests.support.hf_scripts import ScriptFailed, difference, run_script
from tests.support.instruction_pairs import write_pairs
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.finetune_spec import FINETUNE_FILE, FinetuneSpec

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-5
LORA = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    hf_assets.save_models(folder / "models")
    write_pairs(folder / "pairs.jsonl")
    return folder


def settings(assets: Path, **changes: Any) -> dict[str, Any]:
    """Return a fine-tuning part with the values of scripts/sft_alone.py."""
    return {
        "model": str(assets / "models" / "causal"),
        "data": str(assets / "pairs.jsonl"),
        "method": "full",
        "learning_rate": 5e-3,
        "batch_size": 2,
        "accumulation_steps": 2,
        "max_length": 64,
        "steps": 8,
        "seed": 3,
        "log_every_steps": 1,
        "eval": {"share": 0.25, "every_steps": 4},
        **changes,
    }


def finetuned(
    assets: Path,
    folder: Path,
    tier: str = "2",
    ranks: int = 2,
    more: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Run a fine-tuning in a tier, with `more` in the configuration; return what the ranks recorded."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / FINETUNE_FILE
    part.write_text(json.dumps(settings(assets, **changes)))
    config = write_config(folder, tier)
    config.rename(folder / "mounted.json")
    config.symlink_to("mounted.json")  # as Kubernetes mounts a ConfigMap
    blocks = json.loads(config.read_text())
    blocks["zero_optimization"].pop("stage3_gather_16bit_weights_on_model_save", None)
    config.write_text(json.dumps({**blocks, **(more or {})}))
    return run_script(OWN / "finetune.py", folder, str(part), "--deepspeed", str(config), ranks=ranks)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_losses_are_those_of_the_trainer_alone(assets: Path, tmp_path: Path, method: str) -> None:
    more = ["--lora"] if method == "lora" else []
    given = [str(assets / "models" / "causal"), "--data", str(assets / "pairs.jsonl"), *more]
    alone = run_script(OWN / "sft_alone.py", tmp_path / "alone", "--model", *given)
    mine = finetuned(assets, tmp_path / "mine", "3", method=method, lora=LORA)
    assert (len(alone[0].logged["loss"]), len(alone[0].logged["eval_loss"])) == (8, 2)
    assert difference(mine, alone) <= TOLERANCE
    assert saved_difference(assets, tmp_path / "mine" / "output" / "final") > 1e-3


def saved_difference(assets: Path, result: Path) -> float:
    """Return the largest change of a weight in the result, as its users load it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(assets / "models" / "causal")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    if (result / "adapter_config.json").exists():
        loaded: Any = PeftModel.from_pretrained(base, result).merge_and_unload()
    else:
        loaded = AutoModelForCausalLM.from_pretrained(result)
    after = loaded.state_dict()
    assert after.keys() == before.keys()
    return max(float((after[name] - value).abs().max()) for name, value in before.items())


def test_only_completions_count_in_the_loss(assets: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": "red" * number, "completion": " green now"} for number in range(1, 9)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    finetuned(
        assets, tmp_path / "run", ranks=1, data=str(data), completion_only=True, steps=1, eval=None,
        accumulation_steps=1,
    )  # fmt: skip
    tokenizer: Any = AutoTokenizer.from_pretrained(assets / "models" / "causal")
    found = json.loads((tmp_path / "run" / "rows.json").read_text())
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        rest = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        assert {"input_ids": prompt + rest, "labels": [-100] * len(prompt) + rest} in found


def test_training_ends_when_the_evaluation_no_longer_improves(assets: Path, tmp_path: Path) -> None:
    finetuned(
        assets,
        tmp_path,
        steps=40,
        # No loss falls by as much as the threshold after the first evaluation, which counts.
        early_stopping={"patience": 2, "threshold": 100.0},
        eval={"share": 0.25, "every_steps": 2},
    )
    assert json.loads((tmp_path / "state.json").read_text()) == {"step": 6}


def test_what_only_the_configuration_says_is_said_nowhere_else(assets: Path, tmp_path: Path) -> None:
    (found,) = finetuned(
        assets,
        tmp_path,
        ranks=1,
        more={
            "bf16": {"enabled": True},
            "gradient_clipping": 0.5,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "weight_decay": 0.1, "betas": [0.9, 0.95]},
            },
        },
        steps=1,
        eval=None,
    )
    assert len(found.logged["loss"]) == 1


def test_rows_without_a_completion_in_their_length_are_counted(assets: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": "red " * count, "completion": "green"} for count in (1, 1, 50)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    finetuned(
        assets,
        tmp_path / "run",
        ranks=1,
        data=str(data),
        max_length=16,
        steps=1,
        eval=None,
        accumulation_steps=1,
    )
    assert len(json.loads((tmp_path / "run" / "rows.json").read_text())) == 2
    assert (
        "spec.finetune.maxLength: 1 of 3 rows of data are left out"
        in (tmp_path / "run/rank0.log").read_text()
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"method": "lora", "lora": {"targets": ["wqkv"]}},
            "spec.finetune.lora.targets: 'wqkv' is no linear",
        ),
        ({"data": "rows.csv"}, "spec.finetune.data: "),
        (
            {"completion_only": True, "data": "text"},
            "spec.finetune.completionOnly: the rows have no completions",
        ),
        (
            {"model": "bare", "data": "turns"},
            "spec.finetune.chatTemplate: the rows of ",
        ),
        (
            {"data": "turns", "chat_template": "{% for turn in"},
            "with these settings: unexpected 'end of template'; change the rows, chatTemplate",
        ),
        ({"max_length": 2}, "spec.finetune.maxLength: none of the "),
        (
            {"more": {"train_micro_batch_size_per_gpu": 4}},
            "spec.config: ds train_micro_batch_size_per_gpu=4 vs hf per_device_train_batch_size=2",
        ),
    ],
    ids=["targets", "format", "completions", "no-template", "bad-template", "cut", "batch"],
)
def test_bad_input_names_the_field(
    assets: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "rows.csv").write_text("prompt,completion\na,b\n")
    turns = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "green"}]
    folders: dict[str, list[Any]] = {"text": [{"text": "red"}] * 2, "turns": [{"messages": turns}] * 4}
    for name, rows in folders.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bare = shutil.copytree(assets / "models" / "causal", tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    changes = {
        key: str(tmp_path / value) if key in ("data", "model") else value for key, value in changes.items()
    }
    with pytest.raises(ScriptFailed, match="CompatError") as failed:
        finetuned(assets, tmp_path / "run", ranks=1, **changes)
    assert message in str(failed.value)


def test_a_job_whose_model_is_not_there_ends_with_the_code_of_a_wrong_configuration(
    assets: Path, tmp_path: Path
) -> None:
    spec = FinetuneSpec(**settings(assets, eval=None, model="/models/nothing"))
    code, output = finish_finetune(tmp_path, spec)
    assert code == ExitCode.BAD_CONFIG, output
    assert "spec.finetune.model: /models/nothing has no config.json" in output
