"""A Trainer evaluates before it trains, and trains more than once, with the losses of DDP."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.hf_cases import CLM, Case
from tests.support.hf_parity import TOLERANCE, Bench
from tests.support.hf_scripts import Losses, ScriptFailed, difference
from tests.support.on_request import runs_all_examples

pytestmark = pytest.mark.ranks

FEW_STEPS = ("--max_steps", "5", "--eval_strategy", "no", "--save_strategy", "no")
CASE = Case(script="trainer_order.py", arguments=(*CLM, *FEW_STEPS), tier="3")
BEFORE, AFTER = ("evaluate", "predict"), ("train", "evaluate", "train", "predict")
TIERS = ("1", "2", "3", "3 cpu", "3 nvme")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench.make(tmp_path_factory.mktemp("huggingface"))


@pytest.fixture(scope="module")
def reference(bench: Bench) -> list[Losses]:
    """Run what comes before the first training and what follows in processes of their own: after an
    evaluation transformers no longer puts DDP around the model, and every rank trains alone."""
    before = bench.run("before", CASE, None, "--order", *BEFORE)
    after = bench.run("after", CASE, None, "--order", *AFTER)
    return [
        replace(last, logged={key: first.logged.get(key, []) + last.logged[key] for key in last.logged})
        for first, last in zip(before, after, strict=True)
    ]


@pytest.mark.parametrize("tier", TIERS if runs_all_examples() else ("1", "3 cpu"))
def test_evaluations_and_trainings_follow_in_any_order(
    bench: Bench, reference: list[Losses], tier: str
) -> None:
    found = bench.run("order", CASE, tier, "--order", *BEFORE, *AFTER)
    assert len(found[0].losses) == 20
    assert difference(found, reference) <= TOLERANCE


@pytest.mark.parametrize("tier", ["2", "3"])
def test_an_evaluation_in_16_bits_is_one_in_the_precision_of_the_engine(bench: Bench, tier: str) -> None:
    order = ("--order", "train", "evaluate", "--bf16_full_eval", "true", "--use_cpu", "true")
    reference = bench.run("full eval", CASE, None, *order)
    found = bench.run("full eval", CASE, tier, *order)
    assert found[0].logged["eval_loss"] == pytest.approx(reference[0].logged["eval_loss"], abs=0.02)


def test_a_schedule_that_the_engine_steps_begins_anew(bench: Bench) -> None:
    reference = bench.run("after", CASE, None, "--order", *AFTER)
    found = bench.run("optimizer in the JSON", CASE, "3", "--order", *AFTER)
    assert difference(found, reference) <= TOLERANCE


def test_a_schedule_of_the_json_begins_anew(bench: Bench) -> None:
    """DeepSpeed's schedule warms up one step later than the Trainer's, so that DDP is no reference. Rates are
    logged after the engine has stepped it."""
    found = bench.run("optimizer and schedule in the JSON", CASE, "3", "--order", *AFTER)
    for rank in found:
        rates = rank.logged["learning_rate"]
        assert rates[:5] == rates[5:] == pytest.approx([0.0, 1e-2 / 3, 2e-2 / 3, 1e-2, 0.5e-2])


def test_a_schedule_of_the_json_has_one_length(bench: Bench) -> None:
    with pytest.raises(ScriptFailed) as failure:
        bench.run("optimizer and schedule", CASE, "3", "--order", "train", "8", "train")
    assert "scheduler.params.total_num_steps is 5, the length of the first training" in str(failure.value)
    assert "leave the scheduler out of the JSON" in str(failure.value)
