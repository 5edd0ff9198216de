"""Fits and evaluations of one LightningModule follow each other in any order, with the losses of DDP."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.hf_cases import OWN, write_config
from tests.support.hf_parity import TOLERANCE
from tests.support.hf_scripts import difference, run_script

pytestmark = pytest.mark.ranks

SHARDED = json.dumps({"stage3_param_persistence_threshold": 0})
"""Changes of the JSON that leave no parameter whole."""

ORDERS = {
    "before a fit": ("validate", "fit", "test"),
    "one Trainer": ("fit", "test", "fit", "test"),
    "several Trainers": ("freeze", "fit", "new", "test", "freeze", "fit", "new", "fit", "test"),
    "from a checkpoint": (
        *("fit", "save", "fit", "test", "load", "new", "load", "test"),
        *("fresh", "new", "load", "alone", "new", "fit", "test"),
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tier", ["1", "3 cpu"])
def test_fits_and_evaluations_follow_each_other(tmp_path: Path, order: str, tier: str) -> None:
    runs, losses = [], []
    sharded = ["--deepspeed", str(write_config(tmp_path, tier)), "--zero", SHARDED if tier != "1" else "{}"]
    for name, more in (("ddp", []), ("engine", sharded)):
        runs.append(run_script(OWN / "lightning_order.py", tmp_path / name, "--order", *ORDERS[order], *more))
        losses.append(json.loads((tmp_path / name / "evaluated0.json").read_text()))
    assert difference(runs[1], runs[0]) <= TOLERANCE
    assert len(losses[0]) > 0
    assert losses[1] == pytest.approx(losses[0], abs=TOLERANCE)


def test_hyperparameters_that_only_a_pickle_could_hold_are_left_out(tmp_path: Path) -> None:
    config = str(write_config(tmp_path, "1"))
    run_script(
        OWN / "lightning_order.py",
        tmp_path,
        "--order",
        "fit",
        "save",
        "load",
        "--objects",
        "--deepspeed",
        config,
    )
    assert "the hyperparameters activation are left out" in (tmp_path / "rank0.log").read_text()
    assert len(json.loads((tmp_path / "evaluated0.json").read_text())) > 0


@pytest.mark.parametrize(("threshold", "here"), [(0, "5.4 K"), (100_000, "5.5 K")])
def test_the_summary_counts_partitioned_and_whole_parameters(
    tmp_path: Path, threshold: int, here: str
) -> None:
    zero = json.dumps({"stage3_param_persistence_threshold": threshold})
    config = str(write_config(tmp_path, "3"))
    arguments = ["--order", "fit", "--deepspeed", config, "--zero", zero]
    run_script(OWN / "lightning_order.py", tmp_path, *arguments)
    lines = (tmp_path / "rank0.log").read_text().splitlines()
    row = next(line for line in lines if "Sequential" in line)
    cells = [cell.strip() for cell in re.split("[|│]", row)]
    assert cells[cells.index("Sequential") :][:3] == ["Sequential", "5.5 K", here]


def test_a_schedule_that_follows_a_metric_is_stepped_by_lightning(tmp_path: Path) -> None:
    config = str(write_config(tmp_path, "3"))
    plain, ddp, engine = (
        run_script(OWN / "lightning_order.py", tmp_path / name, "--order", "fit", *more)
        for name, more in {
            "plain": [],
            "ddp": ["--plateau"],
            "engine": ["--plateau", "--deepspeed", config],
        }.items()
    )
    assert difference(ddp, plain) > TOLERANCE, "the schedule changed no rate"
    assert difference(engine, ddp) <= TOLERANCE


@pytest.mark.parametrize("option", ["--manual", "--accumulate"])
def test_steps_are_where_the_script_or_its_callback_wants_them(tmp_path: Path, option: str) -> None:
    sharded = ["--deepspeed", str(write_config(tmp_path, "3")), "--zero", SHARDED]
    ddp, engine = (
        run_script(OWN / "lightning_order.py", tmp_path / name, "--order", "fit", option, *more)
        for name, more in {"ddp": [], "engine": sharded}.items()
    )
    assert difference(engine, ddp) <= TOLERANCE
