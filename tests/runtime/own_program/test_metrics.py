"""Metrics of the reporter in a user's program: the trainer's families, pace without pauses, stragglers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.launcher import eventually
from tests.support.own_programs import is_held, launched_program, open_gate, wait_for
from zerotrain.contract.metrics import LAUNCHER_METRICS, RANK_METRICS, WORKER_METRICS

pytestmark = pytest.mark.ranks


STEPS = 40
"""Number of steps, somewhat more than the medians of stragglers need."""

PROGRAM = f"""
from prometheus_client import Gauge

config_of_two = dict(gradient_accumulation_steps=2)
with zt.ProgressReporter(total_steps={STEPS}) as reporter:
    own = Gauge("my_score", "Of the user's own.", registry=reporter.registry)
    engine = build(**config_of_two)
    reporter.watch(engine)
    read = reporter.registry.get_sample_value
    labels = {{"job_name": "demo", "rank": str(RANK)}}

    def step():
        for value in (1.0, torch.tensor([3.0])):
            train(engine)
            reporter.step(value, tokens=64, data_seconds=0.5)

    step()
    first = read("zerotrain_step_duration_seconds_sum", labels)
    began, paused = time.perf_counter(), 0.0
    while engine.global_steps < {STEPS}:
        time.sleep(0.05 * RANK)
        step()
        if engine.global_steps in (5, 10):
            pause_began = time.perf_counter()
            if engine.global_steps == 5:
                with reporter.pause():
                    time.sleep(0.5)
            else:
                engine.save_checkpoint(CHECKPOINTS)
            paused += time.perf_counter() - pause_began
    result = {{
        "wall": time.perf_counter() - began - paused,
        "reported": read("zerotrain_step_duration_seconds_sum", labels) - first,
        "paused": paused,
    }}
    own.set(7)
    with open(os.path.join(FOLDER, f"result-{{RANK}}.json"), "w") as file:
        json.dump(result, file)
    engine.close()
hold("end", ranks=(0, 1))
"""

FED = {
    *("zerotrain_tokens_total", "zerotrain_samples_total", "zerotrain_loss", "zerotrain_grad_norm"),
    *("zerotrain_learning_rate", "zerotrain_step", "zerotrain_total_steps", "zerotrain_memory_peak_bytes"),
    *("zerotrain_step_duration_seconds", "zerotrain_phase_duration_seconds", "zerotrain_rank_info"),
    *("zerotrain_checkpoint_duration_seconds", "zerotrain_checkpoint_size_bytes"),
    *("zerotrain_last_checkpoint_step", "zerotrain_collective_duration_seconds"),
    *(
        "zerotrain_memory_planned_bytes",
        "zerotrain_process_resident_bytes",
        "zerotrain_data_wait_seconds_total",
    ),
    *(
        "zerotrain_step_own_seconds_total",
        "zerotrain_productive_seconds_total",
        "zerotrain_lost_seconds_total",
    ),
}
"""Rows that a run on CPUs without offloading feeds."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the last report and scrape of a run that ended by itself."""
    folder = tmp_path_factory.mktemp("own")
    with launched_program(folder, PROGRAM) as launcher:
        for rank in (0, 1):
            eventually(lambda rank=rank: is_held(folder, "end", rank), what="the end")  # type: ignore[misc]
            wait_for(launcher, rank, phase="done")
        scrape = launcher.request("/metrics")[1].decode()
        ranks = launcher.report()["ranks"]
        open_gate(folder, "end")
        assert launcher.wait() == 0
    samples = [sample for family in text_string_to_metric_families(scrape) for sample in family.samples]
    results = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in (0, 1)]
    return {"samples": samples, "ranks": ranks, "results": results}


def value(found: dict[str, Any], name: str, **labels: str) -> float:
    (sample,) = [
        item for item in found["samples"] if item.name == name and labels.items() <= item.labels.items()
    ]
    return float(sample.value)


def test_the_families_are_the_trainers(found: dict[str, Any]) -> None:
    known = {
        name for spec in (*RANK_METRICS, *LAUNCHER_METRICS, *WORKER_METRICS) for name, _ in spec.samples()
    }
    names = {sample.name for sample in found["samples"]}
    assert names - known == {"my_score"}
    fed = {sample.name.removesuffix("_count") for sample in found["samples"] if sample.value}
    assert FED - fed == set()
    assert value(found, "my_score", rank="1", job_name="demo") == 7


def test_the_numbers_are_those_of_the_steps(found: dict[str, Any]) -> None:
    for rank in ("0", "1"):
        assert value(found, "zerotrain_loss", rank=rank) == 2.0  # the mean of both micro-batches
        assert value(found, "zerotrain_tokens_total", rank=rank) == STEPS * 2 * 64 / 2
        assert value(found, "zerotrain_samples_total", rank=rank) == STEPS * 2 * 2
        assert value(found, "zerotrain_data_wait_seconds_total", rank=rank) == STEPS * 2 * 0.5
        assert value(found, "zerotrain_step_duration_seconds_count", rank=rank) == STEPS
        assert value(found, "zerotrain_last_checkpoint_step", rank=rank) == 10
    for progress in found["ranks"]:
        assert (progress["step"], progress["loss"], progress["total_steps"]) == (STEPS, 2.0, STEPS)
        assert progress["step_seconds"] > 0
        assert progress["tokens_per_second"] == pytest.approx(128 / progress["step_seconds"])
        assert progress["grad_norm"] is not None
        assert min(progress["memory_peak_bytes"], progress["host_peak_bytes"]) > 0


def test_a_pause_or_a_checkpoint_is_no_part_of_a_step(found: dict[str, Any]) -> None:
    for result in found["results"]:
        assert result["paused"] > 0.5
        assert result["reported"] == pytest.approx(result["wall"], abs=result["paused"] / 2)


def test_rank_0_reports_the_slow_rank(found: dict[str, Any]) -> None:
    first, second = (progress["straggler"] for progress in found["ranks"])
    assert second is None
    assert first["rank"] == 1
    assert first["own_seconds"] >= 0.05
