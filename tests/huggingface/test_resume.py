"""A run that stops and goes on in another tier, or on another number of ranks, is the uninterrupted run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.hf_cases import OTHERS_CASES, OWN_CASES, TIERS, Case
from tests.support.hf_parity import TOLERANCE, Bench, runs_everything
from tests.support.hf_scripts import Losses, difference, run_script
from tests.support.tiers import with_slow_rows

pytestmark = pytest.mark.ranks

EACH = 4
"""Steps between two stops."""
GLOBAL_BATCH, MICRO_BATCH = 8, 2
STRATEGIES = ("zerotrain_stage_3", "deepspeed_stage_2", "zerotrain_stage_1", "deepspeed_stage_3_offload")
CASES = {"trainer": OWN_CASES["trainer"], "sft": OTHERS_CASES["sft"]}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench.make(tmp_path_factory.mktemp("huggingface"))


def arguments(steps: int, ranks: int) -> list[str]:
    """Return arguments for a run of so many steps with the same samples per step on any number of ranks."""
    accumulation = GLOBAL_BATCH // MICRO_BATCH // ranks
    return [
        *("--max_steps", str(steps), "--gradient_accumulation_steps", str(accumulation)),
        *("--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", "3", "--save_steps", str(EACH)),
        *("--eval_strategy", "no"),
    ]


def losses(runs: Sequence[Losses]) -> list[float]:
    """Return the losses of the steps, averaged over ranks and micro-batches."""
    return runs[0].logged["loss"]


def went_on(bench: Bench, name: str, case: Case, stations: Sequence[tuple[str, int]]) -> list[float]:
    """Run a case in parts, each in the tier and on the ranks of its station from the checkpoint before."""
    found: list[float] = []
    folder = bench.folder / name
    for place, (tier, ranks) in enumerate(stations):
        more = [*arguments(EACH * (place + 1), ranks), "--output_dir", str(folder)]
        if place:
            more += ["--resume_from_checkpoint", str(folder / f"checkpoint-{EACH * place}")]
        found += losses(bench.run(f"{name} {place}", case, tier, *more, ranks=ranks))
    return found


@pytest.mark.parametrize("name", with_slow_rows(CASES, quick=["trainer"]))
@pytest.mark.parametrize("way", with_slow_rows(["tiers", "ranks"], quick=["ranks"]))
def test_a_stopped_run_goes_on_elsewhere(bench: Bench, name: str, way: str) -> None:
    if way == "tiers":
        stations = [(tier, 2) for tier in (*TIERS, next(iter(TIERS)))]
    else:
        stations = [("3", 2), ("3", 1), ("3", 4)]
    steps = EACH * len(stations)
    whole = losses(bench.run(f"{name} {way}", CASES[name], None, *arguments(steps, 2)))
    parts = went_on(bench, f"{name}_{way}", CASES[name], stations)
    assert len(parts) == len(whole) == steps
    assert max(abs(one - two) for one, two in zip(parts, whole, strict=True)) <= TOLERANCE


def lightning_in_two_parts(folder: Path, strategy: str) -> list[Losses]:
    """Fit ten steps, and the rest from their checkpoint; return the second run's losses.

    Lightning begins the epoch's data anew. ModelCheckpoint saves step 10 again after the resume, in the
    middle of step 11's accumulation.
    """
    script, given = OWN_CASES["lightning"].path, ("--output_dir", "out", "--strategy", strategy)
    run_script(script, folder / "first", *given, "--max_steps", "10")
    return run_script(
        script, folder / "second", *given, "--resume_from_checkpoint", "../first/out/step-step=10.ckpt"
    )


def test_a_lightning_run_goes_on_as_under_ddp(tmp_path: Path) -> None:
    reference = lightning_in_two_parts(tmp_path / "ddp", "ddp")
    assert len(reference[0].losses) > EACH
    for strategy in STRATEGIES if runs_everything() else STRATEGIES[:1]:
        found = lightning_in_two_parts(tmp_path / strategy, strategy)
        assert difference(found, reference) <= TOLERANCE
