"""Scripts in bf16 train as a plain loop with bf16 weights and fp32 masters does, and alike in every tier."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.support.hf_cases import OTHERS_CASES, OWN, OWN_CASES, STEPS, Case, write_config
from tests.support.hf_parity import Bench, tiers_of
from tests.support.hf_scripts import Losses, difference, run_script
from tests.support.tiers import with_slow_rows

pytestmark = pytest.mark.ranks

TOLERANCE = 5e-4
ALIKE = (
    "--use_cpu",
    "true",
    "--learning_rate",
    "5e-4",
    "--max_grad_norm",
    "0",
    "--eval_strategy",
    "no",
    "--save_strategy",
    "no",
)
CASES: Mapping[str, Case] = {
    "trainer": replace(OWN_CASES["trainer"], tier="3"),
    "sft": replace(OTHERS_CASES["sft"], tier="2"),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench.make(tmp_path_factory.mktemp("huggingface"))


def with_masters(bench: Bench, name: str, case: Case, arguments: tuple[str, ...]) -> list[Losses]:
    """Run a case in plain torch, with the optimizer of `bf16_masters.py`."""
    given = [*bench.assets.arguments(case.arguments), *arguments]
    return run_script(OWN / "bf16_masters.py", bench.folder / f"{name} masters", str(case.path), *given)


def without_norms(runs: list[Losses]) -> list[Losses]:
    """Return runs with their losses alone: the Trainer of the plain loop sees no gradients."""
    return [replace(run, logged={"loss": run.logged["loss"]}) for run in runs]


@pytest.mark.parametrize("name", with_slow_rows(CASES, quick=["sft"]))
def test_bf16_is_that_of_a_plain_loop(bench: Bench, name: str) -> None:
    case, weights = CASES[name], str(bench.assets.folder / "models" / "causal-bf16")
    flag = "--model" if name == "trainer" else "--model_name_or_path"
    dtype = () if name == "trainer" else ("--dtype", "bfloat16")
    arguments = (flag, weights, *dtype, *ALIKE)
    plain = without_norms(with_masters(bench, name, case, arguments))
    assert len(plain[0].losses) >= STEPS
    for tier in tiers_of(f"{name}, bf16", case):
        runs = bench.run(f"{name} bf16", case, tier, *arguments, "--bf16", "true")
        found = difference(without_norms(runs), plain)
        print(f"HF | {name}, bf16 | {tier} | {found:.1e} |")
        assert found <= TOLERANCE


def test_tiers_with_whole_masters_have_the_same_bits(bench: Bench) -> None:
    """Train by DPO, whose losses show one weight that is rounded otherwise, where the masters of no tier are
    stored as remainders: these round exact ties up in the weight, which happens within the first steps."""
    case, weights = OTHERS_CASES["dpo"], str(bench.assets.folder / "models" / "causal-bf16")
    found = []
    for tier in ("2", "3 cpu"):
        folder = bench.folder / f"dpo whole {tier}"
        config = write_config(folder, tier)
        settings = json.loads(config.read_text())
        settings["bf16"]["store_param_remainders"] = False
        config.write_text(json.dumps(settings))
        given = ("--model_name_or_path", weights, "--dtype", "bfloat16", *ALIKE, "--learning_rate", "1e-3")
        arguments = [*bench.assets.arguments((*case.arguments, *given)), "--bf16", "true"]
        found.append(run_script(case.path, folder, *arguments, "--deepspeed", str(config)))
    assert len(found[0][0].losses) >= STEPS
    assert [rank.losses for rank in found[0]] == [rank.losses for rank in found[1]]
