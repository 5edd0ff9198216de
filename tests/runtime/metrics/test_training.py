"""Metrics of a real training, scraped over HTTP from its launcher: every row of the catalogue is fed."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.samples import Sample

from tests.support.launcher import RunningLauncher, launched
from tests.support.ports import free_port
from tests.support.tools import run_program
from tests.support.trainer_runs import TEXT, TIMEOUT_S, config, job
from zerotrain.contract.metrics import LAUNCHER_METRICS, RANK_METRICS, WORKER_METRICS, MetricKind
from zerotrain.runtime.offload.free_memory import free_memory

OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}
ONLY_AFTER_FAULTS = {
    "zerotrain_skipped_steps_total",
    "zerotrain_nonfinite_steps_total",
    "zerotrain_fp8_overflow_ratio",
    "zerotrain_grad_norm_spikes_total",
    "zerotrain_loss_spikes_total",
    "zerotrain_state_digest_mismatch_total",
    "zerotrain_spill_io_errors_total",
    "zerotrain_spill_auth_failures_total",
    "zerotrain_checkpoint_failures_total",
    "zerotrain_checkpoint_rejected",
    "zerotrain_tracker_dropped_points_total",
}
"""Metrics that only faults feed, as the tests of each fault show; a normal training does not."""


@dataclass(frozen=True)
class Scrape:
    """One exposition."""

    plain: str
    """Text in the older format."""
    samples: tuple[Sample, ...]

    @classmethod
    def of(cls, launcher: RunningLauncher) -> Scrape:
        text = launcher.request("/metrics", headers=OPENMETRICS)[1].decode()
        families = list(parse_openmetrics(text))  # type: ignore[no-untyped-call]
        plain = launcher.request("/metrics")[1].decode()
        return cls(plain, tuple(sample for family in families for sample in family.samples))

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of the first sample that has these labels."""
        for sample in self.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
        return None

    def total(self, name: str, **labels: str) -> float:
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())


@contextmanager
def training(
    folder: Path, *, file: dict[str, Any], attempt: int = 1, **changes: Any
) -> Iterator[RunningLauncher]:
    """Run two ranks of the built-in trainer until they are stopped."""
    data = folder / "data.txt"
    data.write_text(TEXT)
    spec = job(data_path=str(data), steps=1_000_000, checkpoint={"every_steps": 3, "keep_last": 2}, **changes)
    (folder / "ds_config.json").write_text(json.dumps(file))
    (folder / "train.json").write_text(json.dumps(spec))
    with launched(
        folder,
        "",
        command=[sys.executable, "-m", "zerotrain.runtime.train"],
        train_spec_path=folder / "train.json",
        checkpoint_dir=folder / "checkpoints",
        master_port=free_port(),
        attempt=attempt,
        grace_seconds=30.0,
    ) as launcher:
        yield launcher


def scraped(launcher: RunningLauncher, enough: Callable[[Scrape], bool], what: str) -> Scrape:
    """Return the first scrape that is enough; on a busy machine the start takes long."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and launcher.popen.poll() is None:
        with suppress(OSError, HTTPException):
            found = Scrape.of(launcher)
            if enough(found):
                return found
        time.sleep(0.1)
    launcher.popen.kill()
    raise AssertionError(f"never came true: {what}\n{launcher.finish()[1]}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def first(folder: Path) -> Scrape:
    """Return a scrape of a run in FP8 with spilled states, updated beside the forward pass.

    The run ends without saving.
    """
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": "nvme", "nvme_path": str(folder / "spill"), "just_in_time": True},
    }
    added: dict[str, object] = {"peak_tflops": 1.0, "fp8": {"enabled": True}}
    with training(folder, file=config(zero_optimization=zero, **added)) as launcher:

        def enough(scrape: Scrape) -> bool:
            # Each rank publishes by itself; the launcher shows what it has received.
            return all(
                scrape.value("zerotrain_checkpoint_duration_seconds_count", rank=rank, operation="save")
                and scrape.value("zerotrain_optimizer_background_seconds_total", rank=rank)
                for rank in "01"
            )

        found = scraped(launcher, enough, "two ranks train, spill and save")
        launcher.popen.send_signal(signal.SIGKILL)
    return found


@pytest.mark.ranks
def test_every_row_is_fed(first: Scrape) -> None:
    """Born at 0 is not enough: each family must have been fed a value."""
    fed = {
        sample.name.removesuffix("_count")
        for sample in first.samples
        if sample.value == sample.value and sample.value != 0
    }
    expected = {
        spec.name
        for spec in (*RANK_METRICS, *LAUNCHER_METRICS, *WORKER_METRICS)
        if "GPU" not in spec.only and spec.name not in ONLY_AFTER_FAULTS
    }
    assert expected - fed == set()


@pytest.mark.ranks
def test_every_label_set_is_there(first: Scrape) -> None:
    for spec in (*RANK_METRICS, *LAUNCHER_METRICS):
        if "GPU" in spec.only:
            continue
        name = f"{spec.name}_count" if spec.kind is MetricKind.HISTOGRAM else spec.name
        for label, values in spec.labels.items():
            for known in () if spec.kind is MetricKind.INFO else values:
                for rank in "01":
                    assert first.value(name, rank=rank, **{label: known}) is not None, (name, label, known)


@pytest.mark.ranks
def test_numbers_belong_together(first: Scrape) -> None:
    for rank in "01":

        def of(name: str, rank: str = rank, **labels: str) -> float:
            return first.value(name, rank=rank, **labels) or 0.0

        steps = of("zerotrain_step")
        assert of("zerotrain_step_duration_seconds_count") == steps
        seconds = of("zerotrain_step_duration_seconds_sum")
        phases = ("data", "forward", "backward", "reduce", "optimizer")
        parts = sum(of("zerotrain_phase_duration_seconds_sum", phase=phase) for phase in phases)
        assert 0 < parts <= seconds
        assert of("zerotrain_productive_seconds_total") == pytest.approx(seconds)
        waited = of("zerotrain_collective_wait_seconds_total")
        assert of("zerotrain_step_own_seconds_total") == pytest.approx(seconds - waited)
        assert of("zerotrain_samples_total") == 4 * steps
        assert of("zerotrain_tokens_total") == 4 * 8 * steps
        # Two records a step, the engine's and the trainer's; weights are gathered for each pass of each unit.
        records = of("zerotrain_collective_duration_seconds_count", op="record")
        assert 0 < records < of("zerotrain_collective_duration_seconds_count", op="all_gather")
        assert of("zerotrain_memory_peak_bytes", tier="nvme", phase="step") > 0
        assert of("zerotrain_spill_free_bytes") <= of("zerotrain_spill_capacity_bytes")
        assert of("zerotrain_process_resident_bytes") <= of("zerotrain_process_resident_peak_bytes")
        assert of("zerotrain_lost_seconds_total", reason="startup") > 0
        assert of("zerotrain_world_size") == 2
        assert of("zerotrain_rank_phase", phase="step") + of("zerotrain_rank_phase", phase="checkpoint") == 1
    info = next(sample for sample in first.samples if sample.name == "zerotrain_rank_info")
    expected = {"zero_stage": "3", "dtype": "bf16", "offload": "nvme", "device": "cpu", "world_size": "2"}
    assert expected.items() <= info.labels.items()
    assert first.value("zerotrain_host_memory_limit_bytes", worker="0") == free_memory().limit


@pytest.mark.ranks
def test_steps_are_exemplars(first: Scrape) -> None:
    for rank in ("0", "1"):  # each publishes its own step on its own: they need not be equal
        steps = {
            sample.name: int(sample.exemplar.labels["step"])
            for sample in first.samples
            if sample.exemplar is not None and sample.labels["rank"] == rank
        }
        reached = first.value("zerotrain_step", rank=rank) or 0
        assert 0 < steps["zerotrain_step_duration_seconds_bucket"] <= reached
        assert steps["zerotrain_checkpoint_duration_seconds_bucket"] % 3 == 0


@pytest.mark.tools
def test_promtool_accepts_the_exposition(first: Scrape, promtool: Path) -> None:
    """The linter of promtool, which knows the conventions, is part of the check."""
    run_program([promtool, "check", "metrics"], stdin=first.plain)


@pytest.mark.ranks
def test_steps_done_again_are_no_progress(folder: Path, first: Scrape) -> None:
    """The first attempt was killed between two checkpoints; the second reports which of its steps are new."""
    reached = first.value("zerotrain_step") or 0
    with training(folder, file=config(), attempt=2) as launcher:
        again = scraped(
            launcher,
            lambda scrape: all(
                (scrape.value("zerotrain_step", rank=rank) or 0) > reached + 20 for rank in "01"
            ),
            "new steps",
        )
    resumed = again.value("zerotrain_checkpoint_duration_seconds_count", rank="0", operation="load")
    assert resumed == 1
    for rank in "01":
        replayed = again.value("zerotrain_lost_seconds_total", rank=rank, reason="replayed") or 0.0
        productive = again.value("zerotrain_productive_seconds_total", rank=rank) or 0.0
        total = again.value("zerotrain_step_duration_seconds_sum", rank=rank)
        assert productive > 0
        assert replayed + productive == pytest.approx(total)
