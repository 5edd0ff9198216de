"""Fits and evaluations of one LightningModule follow each other in any order, with the losses of DDP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.hf_cases import OWN, write_config
from tests.support.hf_parity import TOLERANCE
from tests.support.hf_scripts import difference, run_script

pytestmark = pytest.mark.ranks

ORDERS = {
    "before a fit": ("validate", "fit", "test"),
    "one Trainer": ("fit", "test", "fit", "test"),
    "several Trainers": ("freeze", "fit", "new", "test", "freeze", "fit", "new", "fit", "test"),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tier", ["1", "3 cpu"])
def test_fits_and_evaluations_follow_each_other(tmp_path: Path, order: str, tier: str) -> None:
    runs, losses = [], []
    for name, more in (("ddp", []), ("engine", ["--deepspeed", str(write_config(tmp_path, tier))])):
        runs.append(run_script(OWN / "lightning_order.py", tmp_path / name, "--order", *ORDERS[order], *more))
        losses.append(json.loads((tmp_path / name / "evaluated0.json").read_text()))
    assert difference(runs[1], runs[0]) <= TOLERANCE
    assert len(losses[0]) > 0
    assert losses[1] == pytest.approx(losses[0], abs=TOLERANCE)
