"""Updates in the background change no bit: losses, weights and states equal those of synchronous steps.

The runs have clipping in every step, accumulation, a loss scale that overflows, all stages, states in memory
and spilled, pauses injected on both sides, and the usual actions of a training script between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.just_in_time import (
    WIDTH,
    Run,
    batch,
    contents,
    engine_of,
    pause_of,
    slow_down,
    train_step,
)
from tests.support.ranks import run_ranks
from zerotrain.runtime.engine import Engine

pytestmark = pytest.mark.ranks


RUNS = (
    *(Run(stage=stage) for stage in (0, 1, 2, 3)),
    *(Run(stage=stage, dtype="fp32", accumulation=2) for stage in (0, 1, 2, 3)),
    *(Run(stage=stage, dtype="fp16") for stage in (0, 1, 2, 3)),
    *(Run(stage=stage, tier="nvme") for stage in (0, 1, 3)),
    *(Run(stage=stage, tied=True) for stage in (1, 3)),
    Run(stage=3, persistence=WIDTH + 1),
)
DELAY_S = 0.0007


def plain_script(engine: Engine, steps: int) -> list[Any]:
    return [train_step(engine, step) for step in range(steps)]


def busy_script(engine: Engine, steps: int) -> list[Any]:
    """Leave out blocks, evaluate between steps, and change rates or freeze right after a step."""
    seen: list[Any] = []
    for step in range(steps):
        seen.append(train_step(engine, step, leaves_out=1 if step % 3 == 1 else None))
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        if step % 4 == 2:
            engine.eval()
            with torch.no_grad():
                seen.append(engine(batch(-step)).item())
            engine.train()
        if step == steps // 2:
            for parameter in engine.module.get_submodule("blocks.2").parameters():
                parameter.requires_grad_(False)
        if step == steps // 2 + 3:
            for parameter in engine.module.get_submodule("blocks.2").parameters():
                parameter.requires_grad_(True)
    return seen


Script = Callable[[Engine, int], list[Any]]


def outcome(run: Run, script: Script) -> dict[str, Any]:
    """Return what a script saw and the final state."""
    with engine_of(run) as engine:
        if run.just_in_time:
            slow_down(engine, seconds=DELAY_S)
        seen = script(engine, run.steps)
        assert bool(engine.core.updates) is (bool(run.just_in_time) and engine.was_step_applied())
        return {
            "losses": seen,
            "norm": engine.get_global_grad_norm(),
            "skipped": engine.skipped_steps,
            **contents(engine),
        }


def compared(runs: tuple[Run, ...], script: Script) -> list[tuple[str, list[str], int]]:
    """Return, per run, the differences from the synchronous run, and the number of skipped steps."""
    found = []
    for run in runs:
        expected = outcome(replace(run, just_in_time=False), script)
        got = outcome(run, script)
        assert expected.keys() == got.keys()
        differs = [name for name in expected if expected[name] != got[name]]
        found.append((repr(run), differs, got["skipped"]))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_background_changes_no_bit(world_size: int) -> None:
    runs = tuple(run for run in RUNS if world_size > 1 or run.stage == 0)
    for results in run_ranks(world_size, compared, runs, plain_script):
        for run, (name, differs, skipped) in zip(runs, results, strict=True):
            assert differs == [], name
            assert bool(skipped) is (run.dtype == "fp16"), name


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_scripts_do_between_steps_changes_no_bit(world_size: int) -> None:
    runs = tuple(Run(stage=stage) for stage in ((0, 1, 2, 3) if world_size > 1 else (0,)))
    for results in run_ranks(world_size, compared, runs, busy_script):
        for name, differs, _ in results:
            assert differs == [], name


def capture_rates() -> list[float]:
    """Return weights of the first block after one step: rates doubled during it, before it, never."""
    found = []
    for when in ("never", "during", "before"):
        with engine_of(Run(stage=0, dtype="fp32")) as engine:
            groups = engine.optimizer.param_groups

            def double(groups: list[dict[str, Any]] = groups) -> None:
                for group in groups:
                    group["lr"] = 2e-2

            if when == "during":
                pause_of(engine, double)
            if when == "before":
                double()
            train_step(engine, 0)
            engine.synchronize()
            assert groups[0]["lr"] == (1e-2 if when == "never" else 2e-2)
            found.append(float(engine.module.get_parameter("blocks.0.weight").detach().double().sum()))
    return found


def test_a_step_has_the_rates_of_its_call() -> None:
    never, during, before = capture_rates()
    assert during == never
    assert before != never
