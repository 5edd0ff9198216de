"""The folder of a run with three attempts, as `zerotrain run` writes it, made without running anything."""

from __future__ import annotations

import json
import math
from pathlib import Path

from zerotrain.contract.history import HISTORY_DIR, AttemptRecord, Event, Point, file_name, to_line
from zerotrain.contract.progress import Termination

HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\u202eevil\x1b[2J $x^2$ {{7*7}}"
START = 1_790_000_000.0


def point(step: int, at: float) -> Point:
    """Return a point of a falling loss.

    The gradient has a spike at step 45; pairs are merged from step 60.
    """
    loss = 5.5 * math.exp(-step / 40) + 1.2 + 0.1 * math.sin(step)
    norm = 90.0 if step == 45 else 1.0 + 0.3 * math.sin(step / 3)
    return Point(
        step=step,
        time=at,
        loss=loss,
        loss_low=loss - 0.1,
        loss_high=loss + 0.1,
        grad_norm=norm,
        grad_norm_high=norm,
        learning_rate=1e-3 * min(1.0, step / 20),
        seconds=1.0 + 0.2 * math.sin(step / 5),
        tokens=4096,
        flops=2e12,
        peak_flops=5e12,
        phases={"data": 0.02, "forward": 0.25, "backward": 0.45, "reduce": 0.05, "optimizer": 0.1},
        memory={"engine": 900 << 20, "process": 2000 << 20, "spill": 512 << 20},
    )


def attempt(folder: Path, number: int, first: int, last: int, start: float, ended: str | None) -> float:
    """Write one history file; return the time at which the attempt ended."""
    record = AttemptRecord(
        attempt=number,
        job="gpt",
        job_uid="local",
        time=start,
        world_size=4,
        total_steps=120,
        resumed_from=first - 1 or None,
        facts={"ZeRO stage": "3", "precision": "bf16"},
        planned={"engine": 900 << 20, "spill": 512 << 20},
    )
    lines = [to_line(record)]
    at = start
    for step in range(first, last + 1):
        at += 1.0
        lines.append(to_line(point(step, at)))
        if step % 20 == 0:
            name = f"step-{step:010d}-attempt-{number}"
            saved = Event(event="checkpoint", step=step, time=at, seconds=0.8, num_bytes=1 << 28, text=name)
            lines.append(to_line(saved))
    if ended is not None:
        lines.append(to_line(Event(event="ended", step=last, time=at, text=ended)))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file_name(number, "local")).write_text("".join(lines))
    return at


def run_folder(folder: Path) -> Path:
    """Write the history of two failures and a success: steps 1-50, 41-90, 81-120."""
    history = folder / "checkpoints" / "gpt" / HISTORY_DIR
    ends = [
        (1, 1, 50, None, Termination(attempt=1, code=137, rank=2, step=50, last_line=HOSTILE)),
        (2, 41, 90, "ValueError", Termination(attempt=2, code=1, rank=0, step=90, exception=HOSTILE)),
        (3, 81, 120, "stopped in order", Termination(attempt=3, code=0, step=120)),
    ]
    at = START
    for number, first, last, ended, termination in ends:
        at = attempt(history, number, first, last, at + 15, ended)
        place = folder / "attempts" / str(number)
        place.mkdir(parents=True)
        (place / "termination.json").write_text(termination.to_json())
    (folder / "run.json").write_text(json.dumps({"job": "gpt", "attempt": 3}))
    return folder
