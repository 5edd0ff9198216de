"""A run that stops and goes on in another tier, or on another number of ranks, is the uninterrupted run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.hf_cases import OTHERS_CASES, OWN_CASES, TIERS, Case
from tests.support.hf_parity import TOLERANCE, Bench
from tests.support.hf_scripts import Losses, difference, run_script
from tests.support.on_request import runs_all_examples
from tests.support.tiers import with_slow_rows

pytestmark = pytest.mark.ranks

EACH = 4
"""Steps between two stops."""
GLOBAL_BATCH, MICRO_BATCH = 8, 2
STRATEGIES = ("zerotrain_stage_3", "deepspeed_stage_2", "zerotrain_stage_1", "deepspeed_stage_3_offload")
CASES = {**OWN_CASES, **OTHERS_CASES}
IN_CI = ("trainer",)
DEPEND_ON_RANKS = ("grpo", "grpo, lora", "rloo", "reward", "reward, lora", "kto")
"""Cases that have other losses on another number of ranks under DDP, too: each rank generates samples, pairs
them or orders them."""


def resumed() -> list[str]:
    """Return the cases of a Trainer that resume here.

    The best model is chosen by evaluations, which are off; the script of `dpo_reference.py` never resumes; a
    distillation goes on with other samples after the end of an epoch, under DDP too.
    """
    other = ("trainer, best model", "dpo, reference first", "distillation")
    of_trainer = [name for name, case in CASES.items() if "--max_steps" in case.arguments]
    return [name for name in of_trainer if name not in other] if runs_all_examples() else list(IN_CI)


def ways() -> list[tuple[str, str]]:
    """Return (way, case): round the ring of the tiers, and over 2, 1 and 4 ranks."""
    return [
        (way, name)
        for name in resumed()
        for way in ("tiers", "ranks")
        if way == "tiers" or name not in DEPEND_ON_RANKS
    ]


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


@pytest.mark.parametrize(("way", "name"), with_slow_rows(ways(), quick=[("ranks", "trainer")]))
def test_a_stopped_run_goes_on_elsewhere(bench: Bench, way: str, name: str) -> None:
    if way == "tiers":
        stations = [(tier, 2) for tier in (*TIERS, next(iter(TIERS)))]
    else:
        stations = [("3", 2), ("3", 1), ("3", 4)]
    steps = EACH * len(stations)
    whole = losses(bench.run(f"{name} {way}", CASES[name], None, *arguments(steps, 2)))
    parts = went_on(bench, f"{name}_{way}", CASES[name], stations)
    assert len(parts) == len(whole) == steps
    found = [abs(one - two) / max(1.0, abs(two)) for one, two in zip(parts, whole, strict=True)]
    assert max(found) <= TOLERANCE


def test_a_loop_over_accelerate_goes_on_in_another_tier(bench: Bench) -> None:
    case, save = OWN_CASES["accelerate"], ("--save_steps", str(EACH))
    stations = (*TIERS, next(iter(TIERS))) if runs_all_examples() else ("3", "1")
    whole = bench.run("accelerate whole", case, None, "--steps", str(EACH * len(stations)))
    parts: list[list[float]] = [[], []]
    for place, tier in enumerate(stations):
        more = [*save, "--steps", str(EACH * (place + 1)), "--output_dir", str(bench.folder / "accelerate")]
        if place:
            more += ["--resume_from_checkpoint", str(bench.folder / "accelerate" / f"step_{EACH * place}")]
        for rank, run in enumerate(bench.run(f"accelerate {place}", case, tier, *more)):
            parts[rank] += run.losses
    for rank, run in enumerate(whole):
        assert len(parts[rank]) == len(run.losses) == 2 * EACH * len(stations)
        assert max(abs(one - two) for one, two in zip(parts[rank], run.losses, strict=True)) <= TOLERANCE


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
    for strategy in STRATEGIES if runs_all_examples() else STRATEGIES[:1]:
        found = lightning_in_two_parts(tmp_path / strategy, strategy)
        assert difference(found, reference) <= TOLERANCE
