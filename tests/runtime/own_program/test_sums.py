"""Several engine steps in one report: means are of one step, sums are of all, and each counts once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from zerotrain.contract.worker_environment import LaunchSpec, RankEnv
from zerotrain.runtime.channel import RankChannel
from zerotrain.runtime.train.engine_events import EngineEvents
from zerotrain.runtime.train.metering import StepMeter
from zerotrain.runtime.train.report import Reporter

pytestmark = pytest.mark.ranks


CONFIG = {"train_batch_size": 3, "zero_optimization": {"stage": 1}}
STEPS, REPORTS = 10, 4
FIRST = 5
"""Steps before the first report; further reports come at steps 15, 25, 35."""

SKIPPED = (6, 7)
"""Steps before two whose update is left out, both of one report."""


def metered() -> dict[str, Any]:
    """Return the reports of ten steps each; a step takes a second at first and half a second at last."""
    launch = LaunchSpec(
        job="demo", job_uid="u", attempt=1, master_addr="x", world_size=1, node_rank=0, config_path=Path("c")
    )
    reporter = Reporter.start(launch, RankEnv(rank=0, local_rank=0, local_world_size=1), RankChannel(None))
    reporter.is_quiet = True
    events = EngineEvents(reporter)
    meter = StepMeter(events)
    engine, *_ = zt.initialize(model=nn.Linear(2, 2), config=CONFIG)
    results: list[zt.StepResult] = []
    engine.register_step_hook(results.append)
    engine.register_step_hook(meter.count)
    found: dict[str, Any] = {"paces": []}
    loss = torch.zeros((), dtype=torch.float64)

    def train(steps: int) -> None:
        del results[:]
        for _ in range(steps):
            factor = float("inf") if engine.global_steps in SKIPPED else 1.0
            engine.backward(engine(torch.ones(3, 2)).mean() * factor)
            engine.step()
        for value in (1.0, 3.0):  # of two micro-batches, in one tensor
            loss.fill_(value)
            meter.add(loss, tokens=500, data_seconds=0.25)

    for number in range(REPORTS):
        train(STEPS if number else FIRST)
        report = meter.report(engine, results[-1])
        found["means"] = [
            report.result.seconds["forward"],
            sum(one.seconds["forward"] for one in results) / STEPS,
        ]
        found["report"] = (report.steps, report.tokens, report.samples, report.data_seconds, report.loss)
        reporter.step(replace(report, seconds=0.5 if number == REPORTS - 1 else 1.0), engine=engine)
        found["paces"].append((reporter.progress.step_seconds, reporter.progress.tokens_per_second))
    events.paused_seconds += 1e6  # a pause of another thread, which is none of this one's time
    train(STEPS)
    found["clamped"] = meter.report(engine, results[-1]).seconds
    read = reporter.metrics.registry.get_sample_value
    for name in (
        *("step_duration_seconds_count", "step_duration_seconds_sum", "tokens_total", "samples_total"),
        *("data_wait_seconds_total", "skipped_steps_total", "productive_seconds_total"),
        *("step_own_seconds_total", "collective_wait_seconds_total"),
    ):
        found[name] = read(f"zerotrain_{name}", {"job_name": "demo", "rank": "0"})
    lost = {"job_name": "demo", "rank": "0", "reason": "skipped"}
    found["lost"] = read("zerotrain_lost_seconds_total", lost)
    engine.close()
    return found


def test_several_steps_of_one_report() -> None:
    (found,) = run_ranks(1, metered)
    assert found["report"] == (STEPS, 1000, 3 * STEPS, 0.5 / STEPS, 2.0)
    assert found["means"][0] == pytest.approx(found["means"][1])
    assert found["clamped"] == 0.0
    steps = FIRST + STEPS * (REPORTS - 1)
    assert found["step_duration_seconds_count"] == steps
    assert found["step_duration_seconds_sum"] == pytest.approx(steps - STEPS / 2)
    assert found["tokens_total"] == 1000 * REPORTS
    assert found["samples_total"] == 3 * steps
    assert found["data_wait_seconds_total"] == pytest.approx(0.5 * REPORTS)
    spent = found["step_own_seconds_total"] + found["collective_wait_seconds_total"]
    assert spent == pytest.approx(steps - STEPS / 2)
    assert found["skipped_steps_total"] == found["lost"] == len(SKIPPED)
    assert found["lost"] + found["productive_seconds_total"] == pytest.approx(steps - STEPS / 2)


def test_the_pace_is_that_of_the_last_interval() -> None:
    (found,) = run_ranks(1, metered)
    first, second, third, last = found["paces"]
    assert first == (1.0, 1000 / FIRST)
    assert second == (1.0, 2000 / (FIRST + STEPS))
    assert third == (1.0, 1000 / STEPS)
    assert last == (0.5, 1000 / (STEPS / 2))
