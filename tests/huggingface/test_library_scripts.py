"""Scripts that TRL and Accelerate ship run unchanged; those that train equal DDP in every tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hf_cases import OTHERS_CASES, Case
from tests.support.hf_parity import Bench, rows, tiers_of
from tests.support.hf_scripts import run_script

pytestmark = pytest.mark.ranks

CHECKS = {
    "script": Case(
        script="accelerate:test_utils/scripts/test_script.py",
        digest="698b0b4250a6d1ac",
        arguments=(),
        tier="2",
    ),
    "operations": Case(
        script="accelerate:test_utils/scripts/test_ops.py", digest="ff0d2ed734cc1a80", arguments=(), tier="3"
    ),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench.make(tmp_path_factory.mktemp("huggingface"))


@pytest.mark.parametrize("name", rows(OTHERS_CASES, quick=["dpo, lora", "grpo"]))
def test_a_script_of_trl_trains_as_under_ddp(bench: Bench, name: str) -> None:
    bench.compare(name, OTHERS_CASES[name], tiers_of(name, OTHERS_CASES[name]))


@pytest.mark.parametrize("name", CHECKS)
def test_accelerates_own_checks_pass(tmp_path: Path, name: str) -> None:
    """Run Accelerate's scripts, which the environment configures as `accelerate launch` sets it."""
    environment = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": CHECKS[name].tier,
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    }
    run_script(CHECKS[name].path, tmp_path, environment=environment)
