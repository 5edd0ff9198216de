"""The end of the demonstration: the measurements, the loss curve, and whether every promise held."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.demo.facts import ran_as
from deploy.demo.logs import LossPoint

MAX_LAST_LOSS = 3.0
TARGET_S = 20.0
"""Target seconds from a kill to the next step.

A slow machine may exceed it, which is shown but no failure.
"""
METRIC_LINES = 10
SHOWN_METRICS = (
    "zerotrain_step_duration_seconds_sum",
    "zerotrain_step_duration_seconds_count",
    "zerotrain_collective_duration_seconds_count",
    "zerotrain_grad_norm",
    "zerotrain_loss",
    "zerotrain_step",
    "zerotrain_tokens_total",
    "zerotrain_checkpoint_duration_seconds_count",
    "zerotrain_memory_peak_bytes",
    "zerotrain_rank_info",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """All facts that are read from the cluster when the job has ended."""

    title: str
    """Title with the job and its data."""
    status: dict[str, Any]
    total_steps: int
    points: Sequence[LossPoint]
    killed_at: float
    """Monotonic clock of this machine when the rank was killed."""
    killed_after_step: int
    metrics: str
    """/metrics of worker 0, read while it trained."""


def problems(outcome: Outcome) -> list[str]:
    """Return the expectations that did not hold; empty if the demonstration succeeded."""
    status, points = outcome.status, outcome.points
    restarts = status.get("restarts", {})
    steps = {point.step for point in points}
    found = []
    if status.get("phase") != "Completed":
        found.append(f"the job ended as {status.get('phase')}, not Completed")
    if status.get("attempt") != 2:
        found.append(f"attempts: {status.get('attempt')}, expected 2")
    if restarts.get("total") != 1:
        found.append(f"restarts: {restarts}, expected one in all")
    if not points or points[-1].step != outcome.total_steps:
        found.append(
            f"the last logged step is {points[-1].step if points else None}, expected {outcome.total_steps}"
        )
    elif points[-1].loss >= MAX_LAST_LOSS:
        found.append(f"the last loss {points[-1].loss:.3f} is not under {MAX_LAST_LOSS}")
    if missing := sorted(set(range(1, outcome.total_steps + 1)) - steps):
        found.append(f"the loss curve has gaps at steps {missing[:5]}")
    if found_step := resumed_from(outcome):
        if not 0 < found_step <= outcome.killed_after_step:
            found.append(
                f"resumed from step {found_step}, but the kill came after {outcome.killed_after_step}"
            )
    else:
        found.append("the second attempt did not resume from a checkpoint")
    if len(metric_lines(outcome.metrics)) < METRIC_LINES:
        found.append(f"/metrics shows fewer than {METRIC_LINES} zerotrain lines")
    return found


def resumed_from(outcome: Outcome) -> int | None:
    step: int | None = outcome.status.get("checkpoint", {}).get("resumedFromStep")
    return step


def recovery_seconds(outcome: Outcome) -> float | None:
    """Return the seconds from the kill to the first step of the next attempt, as seen in its log."""
    later = [point.seen_at for point in outcome.points if point.attempt > 1]
    return min(later) - outcome.killed_at if later else None


def metric_lines(exposition: str) -> list[str]:
    """Return one sample of each of the most important metrics."""
    lines = [line for line in exposition.splitlines() if not line.startswith("#")]
    chosen = []
    for name in SHOWN_METRICS:
        matches = [line for line in lines if re.match(rf"{name}(_total)?[{{ ]", line)]
        # Every label set starts at 0; one that has changed is more informative.
        moved = [line for line in matches if float(line.rsplit(" ", 1)[1]) != 0.0]
        chosen += (moved or matches)[:1]
    return chosen


def table(outcome: Outcome) -> Table:
    points, restarts = outcome.points, outcome.status.get("restarts", {})
    causes = ", ".join(f"{cause} {count}" for cause, count in restarts.items() if cause in CAUSES and count)
    recovery = recovery_seconds(outcome)
    rows = [
        ("ran as", ran_as(outcome.metrics) or "-"),
        ("steps", f"{points[-1].step if points else 0} of {outcome.total_steps}"),
        ("first loss", f"{points[0].loss:.3f}" if points else "-"),
        ("last loss", f"{points[-1].loss:.3f}" if points else "-"),
        ("attempts", str(outcome.status.get("attempt"))),
        ("restarts by cause", causes or "none"),
        ("killed after step", str(outcome.killed_after_step)),
        ("resumed from step", str(resumed_from(outcome))),
        ("kill to first new step", _against_target(recovery)),
    ]
    result = Table(title="zerotrain demo", show_header=False)
    for row in rows:
        result.add_row(*row)
    return result


def _against_target(recovery: float | None) -> str:
    if recovery is None:
        return "-"
    return (
        f"{recovery:.1f} s ({'within' if recovery <= TARGET_S else 'beyond'} the target of {TARGET_S:.0f} s)"
    )


CAUSES = ("app", "infra", "preemption")


def print_report(console: Console, outcome: Outcome) -> None:
    console.print(table(outcome))
    console.print("worker 0's /metrics:")
    for line in metric_lines(outcome.metrics):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def save_curve(points: Sequence[LossPoint], path: Path, title: str) -> None:
    """Draw the loss over the steps, one line per attempt."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for attempt in sorted({point.attempt for point in points}):
        mine = [point for point in points if point.attempt == attempt]
        axes.plot([p.step for p in mine], [p.loss for p in mine], label=f"attempt {attempt}")
    axes.set(xlabel="step", ylabel="loss (nats)", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
