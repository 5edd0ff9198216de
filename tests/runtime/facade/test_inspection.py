"""Reports of the engine: memory beside its formula, lines in the log, calls after a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrain.runtime as zt
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from tests.support.tiny_models import TinyGPT, token_batches
from zerotrain.contract.config import load, resolve
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.facade.step_hooks import PHASES, StepLog
from zerotrain.runtime.step import StepResult


def engine_with(stage: int = 0, **extra: Any) -> Engine:
    torch.manual_seed(2)
    engine, *_ = zt.initialize(model=TinyGPT(layers=2), config=config(stage, **extra))
    return engine


def train(engine: Engine, steps: int) -> list[StepResult]:
    results = []
    for batch in token_batches(steps, size=2):
        engine.backward(engine(*batch))
        results.append(engine.step())
    return results


def statuses() -> list[tuple[int, int, dict[str, int], int, int, str]]:
    found = []
    for stage in (0, 1, 2, 3):
        engine = engine_with(stage)
        train(engine, 2)
        status = engine.memory_status()
        assert sum(status.live_bytes.values()) == engine.memory.live_bytes()
        assert status.process.rss_bytes > status.persistent_bytes
        assert 0 < status.process.pss_bytes <= status.process.peak_rss_bytes
        found.append(
            (
                status.persistent_bytes,
                status.planned_persistent_bytes,
                dict(status.phase_peak_bytes),
                status.planned_peak_bytes,
                engine.memory.peak_bytes(),
                str(status),
            )
        )
        engine.close()
    return found


@pytest.mark.ranks
def test_memory_is_shown_with_its_formula() -> None:
    for stage, (live, planned, phases, planned_peak, peak, text) in enumerate(run_ranks(2, statuses)[0]):
        assert live == planned, f"stage {stage}"
        assert set(phases) == {"start", "forward", "backward", "step"}
        assert max(phases.values()) == peak <= planned_peak, f"stage {stage}"
        assert min(phases["forward"], phases["backward"], phases["step"]) >= live
        assert "by the formula" in text
        assert "peak in backward" in text


def lines_of(**entries: Any) -> list[tuple[int, str]]:
    """Return lines by step for four steps of known times."""
    log = StepLog(resolve(load({"train_batch_size": 4, **entries}), world_size=1))
    found = []
    for step in range(1, 5):
        seconds = dict.fromkeys((*PHASES, "wait"), 1e-3 * step)
        result = StepResult(step=step, at_boundary=True, seconds=seconds, lr=1e-3, grad_norm=0.5)
        lines = log.add(result, samples=4, skipped_steps=lambda: 1, phase_peaks={"forward": 3 << 20})
        found += [(step, line) for line in lines]
    return found


@pytest.mark.unit
def test_a_line_every_steps_per_print_steps_with_mean_times() -> None:
    assert lines_of() == []
    plain = lines_of(steps_per_print=2)
    assert [step for step, _ in plain] == [2, 4]
    assert "skipped 1 lr 1.000e-03 grad_norm 0.5 loss_scale 1" in plain[0][1]
    full = lines_of(steps_per_print=2, wall_clock_breakdown=True, memory_breakdown=True)
    assert [step for step, _ in full] == [2, 2, 2, 4, 4, 4]
    assert "forward 1.50 ms | backward 1.50 ms | reduce 1.50 ms | optimizer 1.50 ms" in full[1][1]
    assert "forward 3.50 ms" in full[4][1], "an interval must not hold times of the one before"
    assert "peak by phase: forward 3.0 MiB" in full[2][1]


@pytest.mark.unit
def test_the_engine_prints_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_with(steps_per_print=1, wall_clock_breakdown=True)
    train(engine, 1)
    engine.close()
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[:3] for line in printed] == [["zerotrain:", "step", "1"]] * 2
    assert all(f"{name} " in printed[1] for name in PHASES)


@pytest.mark.unit
def test_step_hooks_run_in_order_after_every_boundary() -> None:
    engine = engine_with(gradient_accumulation_steps=2)
    seen: list[tuple[str, int]] = []
    first = engine.register_step_hook(lambda result: seen.append(("first", result.step)))
    engine.register_step_hook(lambda result: seen.append(("second", engine.global_steps)))
    train(engine, 4)
    first.remove()
    train(engine, 2)
    assert seen == [("first", 1), ("second", 1), ("first", 2), ("second", 2), ("second", 3)]
    engine.close()


@pytest.mark.unit
def test_a_step_hook_may_save_and_evaluate(tmp_path: Path) -> None:
    engine = engine_with()
    batch = token_batches(1, size=2)[0]

    def save(result: StepResult) -> None:
        engine.save_checkpoint(tmp_path, tag=f"step{result.step}")
        with torch.no_grad():
            engine(*batch)

    engine.register_step_hook(save)
    train(engine, 2)
    path, _ = engine.load_checkpoint(tmp_path)
    assert path is not None
    assert engine.global_steps == 2
    engine.close()


@pytest.mark.unit
def test_what_a_step_hook_raises_comes_out_of_step() -> None:
    engine = engine_with()

    def fail(result: StepResult) -> None:
        raise LookupError(f"after {result.step}")

    engine.register_step_hook(fail)
    with pytest.raises(LookupError, match="after 1"):
        train(engine, 1)
    assert engine.last_step is not None
    assert engine.last_step.step == 1, "the step itself is whole"
    engine.close()


@pytest.mark.unit
def test_memory_lines_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    zt.see_memory_usage("quiet")
    assert capsys.readouterr().out == ""
    zt.see_memory_usage("after forward", force=True)
    assert capsys.readouterr().out.startswith("after forward | process: resident ")
    assert zt.memory_status("here").rss_bytes > 0
    assert capsys.readouterr().out.startswith("rank 0 here | process: resident ")
