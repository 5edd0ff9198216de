"""The display of the running job: a live table on a terminal, or plain lines in a log."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_EVERY_SECONDS = 5.0


@dataclass
class View:
    """Display of the job's status and pods: in place on a terminal, elsewhere a line every few seconds."""

    console: Console
    started_at: float = field(default_factory=time.monotonic)
    _live: Live | None = None
    _printed_at: float = 0.0
    _last_line: str = ""

    def __enter__(self) -> View:
        if sys.stdout.isatty():
            self._live = Live(console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def print_line(self, text: str) -> None:
        self.console.print(
            f"[{time.monotonic() - self.started_at:6.1f} s] {text}", markup=False, highlight=False
        )

    def show(self, job: dict[str, Any], pods: list[dict[str, Any]], last_line: str) -> None:
        status = job.get("status", {})
        if self._live is not None:
            self._live.update(
                Group(_headline(job["metadata"]["name"], status), _bar(status), _pods(pods), Text(last_line))
            )
            return
        line = _plain(status, pods)
        now = time.monotonic()
        if line != self._last_line and now - self._printed_at >= PLAIN_EVERY_SECONDS:
            self.print_line(line)
            self._last_line, self._printed_at = line, now


def _headline(name: str, status: dict[str, Any]) -> Text:
    progress = status.get("progress", {})
    loss = progress.get("loss")
    shown = "-" if loss is None else f"{loss:.3f}"
    return Text(
        f"{name}  {status.get('phase', '-')}  attempt {status.get('attempt', 0)}  "
        f"loss {shown}  tokens/s {round(progress.get('tokensPerSecond') or 0)}",
        style="bold",
    )


def _bar(status: dict[str, Any]) -> Group:
    progress = status.get("progress", {})
    step, total = progress.get("step", 0), progress.get("totalSteps") or 1
    return Group(Text(f"step {step}/{total}"), ProgressBar(total=total, completed=step, width=60))


def _pods(pods: list[dict[str, Any]]) -> Table:
    table = Table("pod", "node", "phase", "ready", box=None)
    for pod in pods:
        statuses = pod.get("status", {}).get("containerStatuses", [])
        ready = "yes" if statuses and all(item.get("ready") for item in statuses) else "no"
        node = pod.get("spec", {}).get("nodeName", "-")
        table.add_row(pod["metadata"]["name"], node, pod.get("status", {}).get("phase", "-"), ready)
    return table


def _plain(status: dict[str, Any], pods: list[dict[str, Any]]) -> str:
    progress = status.get("progress", {})
    loss = progress.get("loss")
    shown = f", loss {loss:.3f}" if loss is not None else ""
    names = ", ".join(f"{p['metadata']['name']} {p.get('status', {}).get('phase', '-')}" for p in pods)
    return (
        f"{status.get('phase', 'Pending')}, attempt {status.get('attempt', 0)}, "
        f"step {progress.get('step', 0)}/{progress.get('totalSteps', '?')}{shown} | {names or 'no pods'}"
    )
