"""The expositions of a worker and of an operator after a fixed sequence of observations.

`python -m tests.support.expositions` writes them anew, after a change of metrics that is meant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.operator.reconcile_builders import job
from zerotrain.contract.progress import Phase, Progress
from zerotrain.contract.worker_environment import LaunchSpec
from zerotrain.operator.cluster.job_metrics import JobCollector
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.cluster.telemetry import Telemetry
from zerotrain.runtime.launch.rank_table import RankTable
from zerotrain.runtime.metrics import OffloadSample, RankIdentity, StepSample, WorkerMetrics, snapshot
from zerotrain.runtime.offload.free_memory import FreeMemory

FOLDER = Path(__file__).resolve().parents[1] / "monitoring" / "expositions"

Family = tuple[str, str, dict[tuple[str, frozenset[tuple[str, str]]], str]]
"""Type, help, and the values as texts (NaN equals NaN) by name and labels of the sample."""


def families_of(text: str) -> dict[str, Family]:
    """Parse an exposition; the order of families, samples and labels does not matter."""
    return {
        family.name: (
            family.type,
            family.documentation,
            {
                (sample.name, frozenset(sample.labels.items())): repr(float(sample.value))
                for sample in family.samples
            },
        )
        for family in text_string_to_metric_families(text)
    }


def worker_text() -> str:
    """Return /metrics of a worker with two ranks, of which the second one has reported no metrics."""
    spec = LaunchSpec(
        job="gpt",
        job_uid="uid",
        attempt=2,
        master_addr="localhost",
        world_size=2,
        node_rank=0,
        ranks_per_worker=2,
        config_path=Path("config.json"),
    )
    table = RankTable(spec, built_in_trainer=True, clock=lambda: 1000.0, monotonic=lambda: 0.0)
    table.set_running(0, True)
    table.progressed(0, Progress(rank=0, attempt=2, phase=Phase.STEP, step=7, heartbeat_at=1000.0))
    table.measured(0, json.loads(json.dumps(snapshot(observed_rank().registry))))
    memory = FreeMemory(limit=8 << 30, used=3 << 30, source="")
    with patch("zerotrain.runtime.launch.rank_table.free_memory", return_value=memory):
        return _text(table.registry())


def observed_rank() -> WorkerMetrics:
    """Return the metrics of a rank in which everything was observed; all sums are exact in binary."""
    identity = RankIdentity(job="gpt", rank=0, attempt=2, world_size=2, facts={"device": "cpu"})
    metrics = WorkerMetrics(identity, clock=lambda: 1000.0)
    metrics.add_facts(dtype="bfloat16", version="1")
    metrics.set("zerotrain_total_steps", 100)
    metrics.set("zerotrain_memory_planned_bytes", 4096, "cpu")
    metrics.set("zerotrain_memory_peak_bytes", 2048, "gpu", "forward")
    metrics.set("zerotrain_spill_free_bytes", 1 << 40)
    _steps(metrics)
    # On a bound, below the lowest one, above the highest one.
    metrics.observe_collectives("all_gather", [0.0, 0.001, 0.25, 1e6], 1 << 20)
    metrics.observe_collectives("reduce_scatter", (0.5 for _ in range(3)), 512)
    metrics.observe_collectives("record", [], 0)
    metrics.observe_digest(step=9, is_equal=True)
    metrics.observe_digest(step=10, is_equal=False)
    metrics.observe_resume(step=4, seconds=1.5, at=900.0)
    metrics.observe_checkpoint(step=20, seconds=2.5, num_bytes=1 << 30)
    metrics.observe_stall(step=20, seconds=0.125)
    metrics.checkpoint_failed()
    metrics.set_spill(engine="io_uring", direct=True, encryption="AEAD", backend="openssl", reason="")
    for total in (5, 3, 8):  # the second one from a new source, which began at 0
        metrics.set_offload(
            OffloadSample(
                moved_bytes={"h2d": total << 20, "spill_read": total},
                wait_seconds=total / 4,
                pass_seconds=total / 2,
                pass_bytes=total,
                io_errors=1,
                auth_failures=0,
            )
        )
    own = Gauge("my_score", "Of the user's own.", ["split"], registry=metrics.registry)
    own.labels("test").set(0.5)
    return metrics


def _steps(metrics: WorkerMetrics) -> None:
    phases = {"data": 0.25, "forward": 0.5, "backward": 1.0, "reduce": 0.0, "optimizer": 0.125}
    for step in range(1, 20):
        metrics.observe_step(
            StepSample(step=step, seconds=2.0, loss=1.0, grad_norm=1.0, learning_rate=0.5, tokens=4096)
        )
    metrics.observe_step(
        StepSample(
            step=20,
            seconds=2.0,
            loss=8.0,
            grad_norm=math.inf,
            tokens=4096,
            samples=4,
            wait_seconds=0.5,
            background_seconds=0.25,
            phase_seconds=phases,
        )
    )
    metrics.observe_step(
        StepSample(step=24, seconds=0.25, steps=4, skipped=1, loss_scale=1024.0, phase_seconds=phases)
    )
    metrics.observe_step(StepSample(step=25, seconds=400.0, loss=math.nan, wait_seconds=500.0, replayed=True))


def operator_text() -> str:
    """Return /metrics of a leading operator with one job, without the families of its process."""
    telemetry = Telemetry()
    telemetry.watch_jobs(JobCollector([(JobKey("ml", "gpt"), _job())], lambda: True))
    telemetry.leader.set(1)
    telemetry.queue_depth.set(3)
    telemetry.request("GET", "pods", 200, 0.25)
    telemetry.request("POST", "pods", 418, 1e6)
    telemetry.request("WATCH", "zerotrainingjobs", 200)
    telemetry.reconcile_seconds.observe(0.5)
    telemetry.reconcile_errors.inc()
    telemetry.count_jobs({"Running": 1, "Odd": 2})
    telemetry.set_watch_ages({"pods": 2.5})
    telemetry.set_unreadable({("pods", "ml"): True})
    telemetry.count_unresponsive(lambda: 4)
    lines = _text(telemetry.registry).splitlines(keepends=True)
    return "".join(line for line in lines if not line.removeprefix("# HELP ").startswith(_OF_THE_PROCESS))


_OF_THE_PROCESS = ("process_", "# TYPE process_")


def _job() -> dict[str, Any]:
    status = {
        "phase": "Running",
        "attempt": 3,
        "zeroStage": 3,
        "startTime": "2026-01-31T10:00:00Z",
        "attemptStartTime": "2026-01-31T11:00:00Z",
        "workers": {"desired": 4, "running": 4, "ready": 3},
        "ranks": {"desired": 8, "running": 8, "ready": 6},
        "restarts": {"app": 1, "infra": 2, "total": 3},
        "progress": {"step": 120, "totalSteps": 1000, "lastStepTime": "2026-01-31T11:30:00.5Z"},
        "checkpoint": {"last": {"step": 100, "time": "2026-01-31T11:20:00Z"}},
        "straggler": {"attempt": 3, "rank": 5, "percent": 175},
        "failures": [
            {
                "attempt": 2,
                "time": "2026-01-31T10:50:00Z",
                "reason": "SpillIntegrity",
                "exitCode": 84,
                "message": "exit code 84 (the spill): SpillIntegrityError: unit 'h.1'",
            }
        ],
        "memoryPlan": {"verdict": "Fits", "gpuBytes": 10, "hostBytes": 20, "nvmeBytes": 30},
    }
    return job(status=status, resourceVersion="1", creationTimestamp="2026-01-31T09:00:00Z")


def _text(registry: CollectorRegistry) -> str:
    return str(generate_latest(registry).decode())


def _write(texts: Iterable[tuple[str, str]]) -> None:
    for name, text in texts:
        (FOLDER / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    _write([("worker", worker_text()), ("operator", operator_text())])
