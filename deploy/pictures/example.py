"""A job of eight ranks in its second attempt, and looks at it. All values are examples; none is measured."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from zerotrain.client.job import Job
from zerotrain.client.snapshot import Mark, RankRow, Snapshot

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
FIRST_STEP, LAST_STEP, TOTAL_STEPS = 540, 624, 1000
RANKS, RANKS_PER_WORKER = 8, 4
STRAGGLER = 5
MIB = 1 << 20


def looks() -> list[Snapshot]:
    """One look after every step."""
    return [_look(step) for step in range(FIRST_STEP, LAST_STEP + 1)]


def _look(step: int) -> Snapshot:
    rows = tuple(_row(rank, step) for rank in range(RANKS))
    return Snapshot(time=NOW, job=Job.of(_job(step)), rows=rows)


def _row(rank: int, step: int) -> RankRow:
    is_slow = rank == STRAGGLER
    seconds = 1.0 + (step * 37 + rank * 11) % 17 / 100 + (0.6 if is_slow and step % 23 < 7 else 0.0)
    worker = rank // RANKS_PER_WORKER
    return RankRow(
        rank=rank,
        pod=f"gpt-2-{worker}",
        node=f"node-{'ab'[worker]}",
        phase="step",
        step=step,
        step_seconds=seconds,
        waits_s=0.0 if is_slow else 0.5,
        idle_s=0.4,
        gpu_bytes=0,
        host_bytes=(1180 + 9 * rank) * MIB,
        spill_bytes=3072 * MIB,
        mark=Mark.SLOW if is_slow else Mark.FINE,
    )


def _job(step: int) -> dict[str, Any]:
    return {
        "metadata": {"name": "gpt", "namespace": "research", "uid": "example"},
        "spec": {"workers": 2, "ranksPerWorker": RANKS_PER_WORKER, "steps": TOTAL_STEPS},
        "status": {
            "phase": "Running",
            "attempt": 2,
            "ranks": {"desired": RANKS, "running": RANKS, "ready": RANKS},
            "restarts": {"infrastructure": 1, "total": 1},
            "progress": {"attempt": 2, "step": step, "loss": 2.431, "stepSeconds": 1.2, "phase": "step"},
            "checkpoint": {
                "last": {
                    "step": 620,
                    "path": "/checkpoints/gpt",
                    "time": f"{NOW - timedelta(seconds=6):%Y-%m-%dT%H:%M:%SZ}",
                    "attempt": 2,
                    "durable": True,
                },
            },
            "memoryPlan": {
                "verdict": "Fits",
                "ranks": RANKS,
                "hostBytes": 1536 * MIB,
                "nvmeBytes": 3072 * MIB,
            },
        },
    }
