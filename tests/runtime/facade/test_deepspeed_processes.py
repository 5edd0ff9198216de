"""Habits of scripts for DeepSpeed on several ranks, and the lines that they print."""

from __future__ import annotations

import subprocess
import sys

import pytest

import zerotrain.runtime as zt
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from tests.support.tiny_models import TinyGPT, token_batches

pytestmark = pytest.mark.ranks


def moved(stage: int) -> float:
    engine, *_ = zt.initialize(model=TinyGPT(layers=1), config=config(stage))
    same = engine.to(engine.device).to(device=str(engine.device.type))
    assert same is engine
    engine.backward(engine(*token_batches(1, size=1)[0]))
    norm = engine.step().grad_norm
    engine.close()
    return norm


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_is_on_its_device(stage: int) -> None:
    assert all(norm > 0 for norm in run_ranks(2, moved, stage))


IMPORT = "from zerotrain.runtime.deepspeed.utils import log_dist, logger; "
CONFIGURED = "import logging; logging.basicConfig(format='own %(message)s'); "


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", ["INFO [rank 0] one", "INFO two"]),
        (CONFIGURED, ["own [rank 0] one", "own two"]),
        (f"{CONFIGURED}{IMPORT}logger.propagate = False; ", ["INFO [rank 0] one", "INFO two"]),
    ],
    ids=["nothing configured", "configured", "configured, and kept from it"],
)
def test_a_script_sees_what_it_logs(before: str, expected: list[str]) -> None:
    script = (
        f"{before}{IMPORT}log_dist('one', ranks=[0]); logger.info('two'); "
        "logger.setLevel('WARNING'); logger.info('three')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.endswith(end) for line, end in zip(lines, expected, strict=True)), lines
