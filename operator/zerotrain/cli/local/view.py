"""The display of a local run: a progress bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zerotrain.contract.worker_http import WorkerReport


class View(Protocol):
    """Display of one run. `line` may be called from any thread."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def line(self, text: str) -> None:
        """Show a line of the ranks' output."""

    def note(self, text: str) -> None:
        """Show a line of the command itself, such as the start of an attempt or a restart."""

    def update(self, report: WorkerReport) -> None:
        """Show the newest records of the ranks."""


def view_for(console: Console, *, total_steps: int | None) -> View:
    """Return a view that suits the output of `console`."""
    return TerminalView(console, total_steps) if console.is_terminal else PlainView(console)


class PlainView:
    """View that prints the ranks' lines and the command's own. The trainer's log line shows the progress."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def line(self, text: str) -> None:
        self._console.out(text, highlight=False)

    def note(self, text: str) -> None:
        self._console.out(f"zerotrain: {text}", highlight=False)

    def update(self, report: WorkerReport) -> None:
        return None


class TerminalView:
    """View with the ranks' lines above one bar that has step, loss, speed, checkpoint and time left."""

    def __init__(self, console: Console, total_steps: int | None) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=console,
            transient=False,
        )
        self._task = self._progress.add_task("starting", total=total_steps, facts="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        self._console.print(text, style="bold", markup=False, highlight=False)

    def update(self, report: WorkerReport) -> None:
        slowest = report.slowest
        if slowest is None:
            return
        self._progress.update(
            self._task,
            completed=slowest.step,
            total=slowest.total_steps or None,
            description="stopping" if report.stopping else str(slowest.phase),
            facts=facts(report),
        )


def facts(report: WorkerReport) -> str:
    """Return a text such as `loss 2.314 · 12,300 tokens/s · checkpoint 40 · attempt 2`."""
    first = report.ranks[0]
    speed = first.tokens_per_second or 0.0
    parts = [
        f"loss {first.loss:.3f}" if first.loss is not None else "",
        f"{speed:,.0f} tokens/s" if speed else "",
        f"checkpoint {report.checkpoint.step}" if report.checkpoint else "",
        f"attempt {report.attempt}",
    ]
    return " · ".join(part for part in parts if part)
