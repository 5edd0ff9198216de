"""A script as DeepSpeed's users write it trains after a change of nothing but its imports of deepspeed."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


SCRIPT = Path(__file__).parents[2] / "support" / "deepspeed_script.txt"
STEPS, ACCUMULATION = 12, 2

CONFIG: dict[str, Any] = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}},
    "activation_checkpointing": {"cpu_checkpointing": True},
}


def migrated(text: str) -> str:
    """Make the one change: the module from which the names are imported."""
    text = re.sub(r"^import deepspeed$", "from zerotrain.runtime import deepspeed", text, flags=re.MULTILINE)
    return re.sub(r"^from deepspeed\.", "from zerotrain.runtime.deepspeed.", text, flags=re.MULTILINE)


def run_script(path: str, output: str, config: str) -> None:
    sys.argv = [path, "--steps", str(STEPS), "--output", output, "--deepspeed", "--deepspeed_config", config]
    runpy.run_path(path, run_name="__main__")


def test_only_the_imports_differ() -> None:
    before, after = SCRIPT.read_text().splitlines(), migrated(SCRIPT.read_text()).splitlines()
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 4
    assert all(re.match(r"from zerotrain\.runtime(\.deepspeed\S*)? import ", line) for line in changed)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Return by stage what each of two ranks wrote."""
    found = {}
    for stage in (1, 3):
        folder = tmp_path_factory.mktemp(f"stage{stage}")
        script, config = folder / "train.py", folder / "ds_config.json"
        script.write_text(migrated(SCRIPT.read_text()))
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config.write_text(json.dumps({**CONFIG, "zero_optimization": zero}))
        run_ranks(2, run_script, str(script), str(folder), str(config))
        found[stage] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_it_trains_and_reports(reports: dict[int, list[dict[str, Any]]], stage: int) -> None:
    first, second = reports[stage]
    per_step = np.reshape([first["losses"], second["losses"]], (2, STEPS, ACCUMULATION)).mean(axis=(0, 2))
    assert per_step[-3:].mean() < 0.7 * per_step[0]
    assert {key: first[key] for key in first if key != "losses"} == {
        key: second[key] for key in second if key != "losses"
    }
    assert first["bias"] == [0.0] * 4
    assert (first["steps"], first["samples"], first["batch"], first["micro"]) == (STEPS, 16 * STEPS, 16, 4)
    assert first["applied"]
    assert first["norm"] > 0
    assert first["lr"] == [pytest.approx(0.01)]


def test_stages_give_the_same_losses(reports: dict[int, list[dict[str, Any]]]) -> None:
    for rank in range(2):
        one, three = reports[1][rank]["losses"], reports[3][rank]["losses"]
        assert np.allclose(one, three, rtol=0, atol=1e-4)
