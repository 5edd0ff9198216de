"""The worker's metrics: they start at 0, are valid in both formats, merged over ranks, and count spikes."""

from __future__ import annotations

import json
import math
import random
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.support.launcher import eventually, launched
from zerotrain.contract.metrics import LAUNCHER_METRICS, RANK_METRICS, WORKER_METRICS, MetricKind
from zerotrain.runtime.metrics import MergedCollector, RankIdentity, StepSample, WorkerMetrics
from zerotrain.runtime.metrics.snapshot import restore, snapshot
from zerotrain.runtime.metrics.spikes import SpikeDetector, SpikeRule

COMMON = {"job_name": "gpt", "rank": "1"}


def metrics(now: float = 1000.0) -> WorkerMetrics:
    return WorkerMetrics(RankIdentity(job="gpt", rank=1, attempt=2, world_size=4), clock=lambda: now)


def value(worker: WorkerMetrics, name: str, **labels: str) -> float | None:
    return worker.registry.get_sample_value(name, COMMON | labels)


@pytest.mark.unit
def test_every_series_of_the_catalogue_exists_from_the_start() -> None:
    """Prometheus's `increase()` misses a counter that starts at 1."""
    worker = metrics()
    for spec in RANK_METRICS:
        if spec.kind is MetricKind.INFO or spec.only:
            continue
        name = f"{spec.name}_count" if spec.kind is MetricKind.HISTOGRAM else spec.name
        for values in product(*spec.labels.values()):
            labels = dict(zip(spec.labels, values, strict=True))
            first = value(worker, name, **labels)
            assert first is not None, (name, labels)
            assert first == 0 or spec.kind is MetricKind.GAUGE, (name, labels)


@pytest.mark.unit
def test_a_step_feeds_histograms_gauges_and_counters() -> None:
    worker = metrics(now=5000.0)
    worker.observe_step(
        StepSample(
            step=7,
            seconds=2.0,
            loss=3.5,
            grad_norm=0.25,
            tokens=4096,
            samples=4,
            phase_seconds={"data": 0.25, "forward": 0.5, "backward": 1.0, "optimizer": 0.125},
        )
    )
    worker.observe_collectives("all_gather", [0.01], 1024)
    expected = {
        "zerotrain_step": 7,
        "zerotrain_loss": 3.5,
        "zerotrain_grad_norm": 0.25,
        "zerotrain_last_step_timestamp_seconds": 5000.0,
        "zerotrain_tokens_total": 4096,
        "zerotrain_samples_total": 4,
        "zerotrain_step_duration_seconds_sum": 2.0,
        "zerotrain_optimizer_step_duration_seconds_count": 1,
        "zerotrain_compute_seconds_total": 1.625,
        "zerotrain_productive_seconds_total": 2.0,
        "zerotrain_data_wait_seconds_total": 0.25,
    }
    assert {name: value(worker, name) for name in expected} == expected
    assert value(worker, "zerotrain_phase_duration_seconds_sum", phase="backward") == 1.0
    assert value(worker, "zerotrain_collective_bytes_total", op="all_gather") == 1024


@pytest.mark.unit
def test_time_of_skipped_and_repeated_steps_is_not_productive() -> None:
    worker = metrics()
    worker.observe_step(StepSample(step=1, seconds=1.0, skipped=True))
    worker.observe_step(StepSample(step=1, seconds=1.0, replayed=True))
    assert value(worker, "zerotrain_productive_seconds_total") == 0
    assert value(worker, "zerotrain_skipped_steps_total") == 1


@pytest.mark.unit
def test_a_wait_longer_than_its_step_counts_as_the_whole_step() -> None:
    worker = metrics()
    worker.observe_step(StepSample(step=1, seconds=0.5, wait_seconds=0.2))
    worker.observe_step(StepSample(step=2, seconds=0.5, wait_seconds=0.7))
    assert value(worker, "zerotrain_collective_wait_seconds_total") == pytest.approx(0.7)
    assert value(worker, "zerotrain_step_own_seconds_total") == pytest.approx(0.3)


@pytest.mark.unit
def test_nonfinite_steps_are_counted_once_each() -> None:
    worker = metrics()
    assert math.isnan(value(worker, "zerotrain_loss") or 0.0)
    worker.observe_step(StepSample(step=1, seconds=1.0, loss=math.nan, grad_norm=math.inf))
    worker.observe_step(StepSample(step=2, seconds=1.0, loss=1.0, grad_norm=math.inf))
    worker.observe_step(StepSample(step=3, seconds=1.0, loss=1.0, grad_norm=1.0))
    assert value(worker, "zerotrain_nonfinite_steps_total") == 2


@pytest.mark.unit
def test_checkpoint_staleness_counts_from_the_start_until_there_is_one() -> None:
    worker = metrics(now=1000.0)
    assert value(worker, "zerotrain_last_checkpoint_timestamp_seconds") == 1000.0
    worker.observe_resume(step=20, seconds=0.5, at=900.0)
    assert value(worker, "zerotrain_last_checkpoint_timestamp_seconds") == 900.0
    worker.observe_checkpoint(step=40, seconds=1.0, num_bytes=10)
    assert value(worker, "zerotrain_last_checkpoint_timestamp_seconds") == 1000.0
    assert value(worker, "zerotrain_last_checkpoint_step") == 40
    assert value(worker, "zerotrain_checkpoint_duration_seconds_count", operation="save") == 1


@pytest.mark.unit
@pytest.mark.parametrize(
    ("series", "spikes"),
    [
        ([1.0] * 20 + [9.0] + [1.0] * 5, 1),
        ([1.0] * 10 + [9.0] * 3, 0),  # too young for a baseline
        ([1.0, math.nan] * 20, 0),
        ([1.0] * 64 + [9.0] * 200, 32),  # a lasting change becomes the new normal
        ([0.0] * 20 + [0.0], 0),
        ([0.0] * 20 + [1e-9, 3.0], 0),  # nothing to compare with
        ([-1.0, -1.01, -0.99] * 20, 0),  # an ELBO, a policy's loss
        ([-1.0, -1.01, -0.99] * 20 + [4.0] + [-1.0] * 5, 1),
        ([-0.3, 0.2, 0.0, 0.4, -0.1] * 20, 0),  # about zero
        ([-0.3, 0.2, 0.0, 0.4, -0.1] * 20 + [9.0], 1),
    ],
)
def test_spikes_are_counted_where_they_happen(series: list[float], spikes: int) -> None:
    detector = SpikeDetector(SpikeRule(factor=5.0))
    assert sum(detector.observe(item) for item in series) == spikes


@pytest.mark.unit
def test_a_noisy_loss_is_no_spike_and_a_spike_of_a_noisy_loss_is_one() -> None:
    noise = random.Random(1)
    series = [0.05 * math.exp(noise.gauss(0.0, 0.2)) for _ in range(9000)]
    detector = SpikeDetector(SpikeRule(factor=1.5))
    assert sum(map(detector.observe, series)) == 0
    assert detector.observe(0.5)


def noisy(seed: int, steps: int, make: Callable[[random.Random], float]) -> list[float]:
    source = random.Random(seed)
    return [make(source) for _ in range(steps)]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("series", "most"),
    [
        (noisy(1, 200, lambda source: -1 + source.gauss(0, 0.01)), 0),
        (noisy(2, 9000, lambda source: source.lognormvariate(-3, 0.2)), 9),  # one in a thousand
        (noisy(3, 2000, lambda source: source.gauss(0, 1)), 2),
        ([0.0] * 40 + [1e-6] * 5, 0),  # frozen: nothing to compare with
    ],
)
def test_noise_and_negative_losses_are_no_spikes(series: list[float], most: int) -> None:
    detector = SpikeDetector(SpikeRule(factor=1.5))
    assert sum(detector.observe(item) for item in series) <= most


@pytest.mark.unit
def test_a_negative_or_noisy_series_can_spike() -> None:
    for calm in (
        noisy(4, 64, lambda source: -1 + source.gauss(0, 0.01)),
        noisy(5, 64, lambda source: source.lognormvariate(-3, 0.2)),
    ):
        detector = SpikeDetector(SpikeRule(factor=1.5))
        assert not any(detector.observe(item) for item in calm)
        assert detector.observe(2.0)


@pytest.mark.unit
def test_snapshot_survives_json_and_gives_the_same_exposition() -> None:
    worker = metrics()
    worker.observe_step(StepSample(step=1, seconds=0.3, loss=5.0, grad_norm=math.inf))
    merged = MergedCollector("gpt")
    merged.update(1, restore(json.loads(json.dumps(snapshot(worker.registry)))))
    registry = CollectorRegistry()
    registry.register(merged)

    def lines(source: CollectorRegistry) -> set[str]:
        text = generate_latest(source).decode()
        return {line for line in text.splitlines() if "_created" not in line}

    assert lines(registry) == lines(worker.registry)
    openmetrics = generate_openmetrics(registry).decode()  # type: ignore[no-untyped-call]
    assert '# {step="1"}' in openmetrics


@pytest.mark.unit
def test_ranks_share_one_family_and_cannot_speak_for_each_other() -> None:
    merged = MergedCollector("gpt")
    for rank in (0, 1):
        registry = CollectorRegistry()
        Counter("mine_total", "A user's own counter without our labels.", registry=registry).inc(rank)
        forged = {"job_name": "other", "rank": "0"}
        Gauge("zerotrain_step", "Forged.", list(forged), registry=registry).labels(**forged).set(rank)
        merged.update(rank, restore(snapshot(registry)))
    registry = CollectorRegistry()
    registry.register(merged)
    text = generate_latest(registry).decode()
    assert text.count("# TYPE mine_total counter") == 1
    assert 'mine_total{job_name="gpt",rank="1"} 1.0' in text
    assert 'zerotrain_step{job_name="gpt",rank="1"} 1.0' in text
    assert "other" not in text


@pytest.mark.unit
@pytest.mark.parametrize(
    "family",
    [
        {"name": "a b", "help": "", "type": "gauge", "unit": "", "samples": []},
        {"name": "a", "help": "", "type": "nonsense", "unit": "", "samples": []},
        {"name": "a", "help": "", "type": "gauge", "unit": "", "samples": [["b", {}, 1, None]]},
        {"name": "a", "help": "", "type": "gauge", "unit": "", "samples": [["a", {"x-y": "1"}, 1, None]]},
        {"name": "a", "help": "", "type": "gauge", "unit": "", "samples": [["a", {"x": 1}, 1, None]]},
        {"name": "a", "help": "", "type": "gauge", "unit": "", "samples": [["a", {}, "much", None]]},
        {"name": "a", "help": "", "type": "gauge", "unit": "", "samples": [["a", [], 1, None]]},
        {"name": "a", "help": "", "type": "gauge", "unit": "", "samples": [["a"]]},
        {"name": "a", "help": 7, "type": "gauge", "unit": "", "samples": []},
        {"name": "a"},
        "text",
    ],
)
def test_what_is_no_snapshot_is_refused(family: object) -> None:
    with pytest.raises(ValueError):
        restore([family])  # type: ignore[list-item]


@pytest.mark.ranks
def test_live_exposition_of_two_ranks_is_valid_in_both_formats(tmp_path: Path) -> None:
    text = """
    from zerotrain.runtime.metrics import RankIdentity, StepSample, WorkerMetrics
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    channel = RankChannel.from_env()
    metrics = WorkerMetrics(RankIdentity(job="demo", rank=RANK, attempt=ATTEMPT, world_size=2))
    channel.attach_metrics(metrics.registry)
    for step in range(1, 100_000):
        metrics.observe_step(StepSample(step=step, seconds=0.1, loss=4.0, grad_norm=1.0, tokens=10))
        metrics.observe_collectives("all_gather", [0.001], 100)
        channel.publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=step))
        channel.publish_metrics()
        time.sleep(0.05)
    """
    with launched(tmp_path, text) as launcher:
        wanted = [f'zerotrain_step{{job_name="demo",rank="{rank}"}}' for rank in (0, 1)]
        eventually(lambda: all(name in launcher.request("/metrics")[1].decode() for name in wanted))
        plain = launcher.request("/metrics")[1].decode()
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        openmetrics = launcher.request("/metrics", headers=accept)[1].decode()
        launcher.popen.send_signal(signal.SIGTERM)
        assert launcher.wait() == 75
    strict = list(parse_openmetrics(openmetrics))  # type: ignore[no-untyped-call]
    for families in (list(parse_text(plain)), strict):
        names = {family.name for family in families}
        assert len(names) == len(families)
        for spec in (*RANK_METRICS, *LAUNCHER_METRICS, *WORKER_METRICS):
            assert spec.only or spec.name.removesuffix("_total").removesuffix("_info") in {
                name.removesuffix("_info") for name in names
            }
        series = [(s.name, tuple(sorted(s.labels.items()))) for family in families for s in family.samples]
        assert len(series) == len(set(series))
        assert all(dict(labels).get("rank", "-") in "01" for _, labels in series if "rank" in dict(labels))
    assert 'zerotrain_rank_up{job_name="demo",rank="1"} 1.0' in plain
