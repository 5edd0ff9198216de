"""The metrics of a catalogue, and what a rank counts in them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from zerotrain.contract.metrics import MetricKind, MetricSpec, Rows, Source
from zerotrain.runtime.metrics import Families, OffloadSample, RankIdentity, StepSample, WorkerMetrics

pytestmark = pytest.mark.unit


ROWS = Rows(source=Source.RANK)
COMMON = {"job_name": "gpt", "rank": "0"}
SPECS: tuple[MetricSpec, ...] = (
    ROWS.counter("zerotrain_c_total", "C.", op=("a", "b")),
    ROWS.gauge("zerotrain_g", "G."),
    ROWS.seconds("zerotrain_h_seconds", "H.", (0.1, 1.0, 10.0)),
    Rows(source=Source.RANK, only="there is one").gauge("zerotrain_o", "O.", tier=("x", "y")),
    ROWS.info("zerotrain_i_info", "I.", "fact"),
)


def test_the_programs_own_registry_and_its_creation_times_are_left_alone() -> None:
    created = "zerotrain_test_mine_created"
    prometheus_client.Counter("zerotrain_test_mine_total", "The program's own.")
    families = Families(SPECS, COMMON)
    families.counter("zerotrain_c_total", "a").inc()
    of_the_program = generate_latest(prometheus_client.REGISTRY).decode()
    assert "zerotrain_c" not in of_the_program
    assert (created in of_the_program) is prometheus_client.metrics._use_created
    assert b"_created" not in generate_latest(families.registry())


def test_values_are_the_same_where_the_program_keeps_its_metrics_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text() -> bytes:
        families = Families(SPECS, COMMON)
        families.counter("zerotrain_c_total", "a").inc(2)
        families.gauge("zerotrain_g").set(3)
        families.histogram("zerotrain_h_seconds").observe(1.0, {"step": "4"})
        families.info("zerotrain_i_info").info({"fact": "f"})
        return generate_latest(families.registry())

    expected = text()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    in_files = prometheus_client.values.MultiProcessValue()  # type: ignore[no-untyped-call]
    monkeypatch.setattr(prometheus_client.values, "ValueClass", in_files)
    assert text() == expected
    assert list(tmp_path.iterdir())


def test_what_is_not_everywhere_is_absent_until_it_is_set() -> None:
    families = Families(SPECS, COMMON)
    assert b"zerotrain_o" not in generate_latest(families.registry())
    assert b"zerotrain_i_info{" not in generate_latest(families.registry())
    families.gauge("zerotrain_o", "y").set(3)
    assert b'zerotrain_o{job_name="gpt",rank="0",tier="y"} 3.0' in generate_latest(families.registry())
    assert b'tier="x"' not in generate_latest(families.registry())


def test_wrong_names_labels_and_kinds_are_refused() -> None:
    families = Families(SPECS, COMMON)
    with pytest.raises(KeyError, match="catalogue"):
        families.counter("zerotrain_c_total", "z")
    with pytest.raises(KeyError):
        families.counter("zerotrain_unknown_total")
    with pytest.raises(TypeError, match="is a Gauge in the catalogue"):
        families.counter("zerotrain_g")


def worker() -> WorkerMetrics:
    return WorkerMetrics(RankIdentity(job="gpt", rank=0, attempt=1), clock=lambda: 100.0)


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, COMMON | labels)


def test_the_step_is_the_exemplar_of_what_it_is_counted_in() -> None:
    metrics = worker()
    for step in range(1, 20):
        metrics.observe_step(StepSample(step=step, seconds=0.2, loss=1.0, grad_norm=1.0))
    metrics.observe_step(
        StepSample(step=20, seconds=40.0, loss=math.nan, grad_norm=50.0, phase_seconds={"optimizer": 0.3})
    )
    text = generate_openmetrics(metrics.registry).decode()  # type: ignore[no-untyped-call]
    found = {
        (sample.name, sample.labels.get("le")): sample.exemplar.labels["step"]
        for family in parse_openmetrics(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert found == {
        ("zerotrain_step_duration_seconds_bucket", "0.25"): "19",
        ("zerotrain_step_duration_seconds_bucket", "60.0"): "20",
        ("zerotrain_phase_duration_seconds_bucket", "0.5"): "20",
        ("zerotrain_optimizer_step_duration_seconds_bucket", "0.5"): "20",
        ("zerotrain_nonfinite_steps_total", None): "20",
        ("zerotrain_grad_norm_spikes_total", None): "20",
    }


def test_an_overflow_of_fp16_is_no_nonfinite_step() -> None:
    metrics = worker()
    overflow = StepSample(step=1, seconds=1.0, loss=1.0, grad_norm=math.inf, loss_scale=65536.0, skipped=True)
    metrics.observe_step(overflow)
    assert value(metrics, "zerotrain_nonfinite_steps_total") == 0
    metrics.observe_step(replace(overflow, step=2, loss_scale=1.0))
    metrics.observe_step(replace(overflow, step=3, loss=math.nan))
    assert value(metrics, "zerotrain_nonfinite_steps_total") == 2
    assert value(metrics, "zerotrain_skipped_steps_total") == 3


def test_all_time_of_a_process_is_progress_or_lost() -> None:
    now = [0.0]
    metrics = WorkerMetrics(RankIdentity(job="gpt", rank=0, attempt=1), clock=lambda: now[0])
    now[0] = 12.0  # the first step ends: imports and rendezvous took ten seconds
    metrics.observe_step(StepSample(step=1, seconds=2.0, replayed=True))
    metrics.observe_step(StepSample(step=2, seconds=3.0, wait_seconds=1.0))
    metrics.observe_step(StepSample(step=3, seconds=4.0, skipped=True))
    metrics.observe_stall(step=3, seconds=5.0)
    lost = {reason: value(metrics, "zerotrain_lost_seconds_total", reason=reason) for reason in LOST}
    assert lost == {"startup": 10.0, "replayed": 2.0, "skipped": 4.0, "checkpoint": 5.0}
    assert value(metrics, "zerotrain_productive_seconds_total") == 3.0
    assert value(metrics, "zerotrain_step_own_seconds_total") == 8.0
    assert value(metrics, "zerotrain_phase_duration_seconds_sum", phase="checkpoint") == 5.0


LOST = ("startup", "replayed", "skipped", "checkpoint")


def test_offloading_is_reported_in_totals() -> None:
    metrics = worker()
    metrics.set_offload(
        OffloadSample(moved_bytes={"spill_read": 10}, pass_bytes=7, io_errors=1, auth_failures=2)
    )
    metrics.set_offload(
        OffloadSample(moved_bytes={"spill_read": 25}, pass_bytes=9, io_errors=1, auth_failures=2)
    )
    # Totals of a new source, which began at 0.
    metrics.set_offload(OffloadSample(moved_bytes={"spill_read": 5}, pass_bytes=1))
    assert value(metrics, "zerotrain_transfer_bytes_total", direction="spill_read") == 25
    assert value(metrics, "zerotrain_spill_pass_bytes_total") == 9
    assert value(metrics, "zerotrain_spill_io_errors_total") == 1
    assert value(metrics, "zerotrain_spill_auth_failures_total") == 2


def test_every_kind_is_covered() -> None:
    assert {spec.kind for spec in SPECS} == set(MetricKind)
