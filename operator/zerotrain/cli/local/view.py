"""The display of a local run: a progress bar on a terminal, plain lines anywhere else, and its last lines."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zerotrain.cli.local.attempt import AttemptEnd
from zerotrain.client.formatting import compute_text
from zerotrain.client.localrun import LocalRun
from zerotrain.contract.exit_codes import ExitCode, RetryClass, meaning_of
from zerotrain.contract.progress import CheckpointProgress
from zerotrain.contract.worker_http import WorkerReport


class View(Protocol):
    """Display of one run. `line` may be called from any thread."""

    def line(self, text: str) -> None:
        """Show a line of the ranks' output."""

    def note(self, text: str) -> None:
        """Show a line of the command itself, such as the start of an attempt or a restart."""

    def update(self, report: WorkerReport) -> None:
        """Show the newest records of the ranks."""


@contextmanager
def view_for(console: Console, *, total_steps: int | None) -> Iterator[View]:
    """Yield a view that suits the output of `console`."""
    if console.is_terminal:
        view = TerminalView(console, total_steps)
        with view.progress:
            yield view
    else:
        yield PlainView(console)


class PlainView:
    """View that prints the ranks' lines and the command's own. The trainer's log line shows the progress."""

    def __init__(self, console: Console) -> None:
        self._console = console

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
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=console,
            transient=False,
        )
        self._task = self.progress.add_task("starting", total=total_steps, facts="")

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        self._console.print(text, style="bold", markup=False, highlight=False)

    def update(self, report: WorkerReport) -> None:
        slowest = report.slowest
        if slowest is None:
            return
        self.progress.update(
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
        compute_text(None, first.mfu),
        f"checkpoint {report.checkpoint.step}" if report.checkpoint else "",
        f"attempt {report.attempt}",
    ]
    return " · ".join(part for part in parts if part)


def print_summary(
    console: Console,
    plan: LocalRun,
    run_dir: Path,
    end: AttemptEnd,
    *,
    attempts: int,
    restarts: Mapping[str, int],
    elapsed_s: float,
) -> None:
    """Print one fact per line as `name: value`, the same on a terminal and in a file."""
    title, style = _title(end.code)
    console.print(f"{plan.name} {title}", style=style)
    causes = ", ".join(f"{cause} {count}" for cause, count in sorted(restarts.items()))
    rows = [
        ("steps", f"{end.step} of {plan.total_steps}" if plan.total_steps else str(end.step)),
        ("loss", _loss(end)),
        ("checkpoint", _checkpoint(end)),
        ("attempts", f"{attempts}" + (f" (restarts: {causes})" if causes else "")),
        ("time", f"{elapsed_s:.1f} s"),
        *_failure(end),
        ("next", _next(end, run_dir)),
    ]
    _print_rows(console, rows)


def print_failure(console: Console, name: str, end: AttemptEnd) -> None:
    """Print how an attempt ended that did not complete, and which rank failed first."""
    title, style = _title(end.code)
    console.print(f"{name} {title}", style=style)
    _print_rows(console, _failure(end))


def _print_rows(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    for name, value in rows:
        if value:
            console.out(f"  {name + ':':<12}{value}", highlight=False)


def _title(code: int) -> tuple[str, str]:
    match code:
        case ExitCode.DONE:
            return "is complete", "bold green"
        case ExitCode.YIELDED:
            return "stopped on request", "bold yellow"
        case ExitCode.TERMINATED:
            return "was ended before it could checkpoint", "bold yellow"
        case _:
            return "failed", "bold red"


def _loss(end: AttemptEnd) -> str:
    loss = end.report.ranks[0].loss if end.report and end.report.ranks else None
    return "" if loss is None else f"{loss:.4f}"


def _newest_checkpoint(end: AttemptEnd) -> CheckpointProgress | None:
    return end.termination.checkpoint or (end.report.checkpoint if end.report else None)


def _checkpoint(end: AttemptEnd) -> str:
    newest = _newest_checkpoint(end)
    return "" if newest is None else f"step {newest.step} in {newest.path}"


def _failure(end: AttemptEnd) -> Iterator[tuple[str, str]]:
    if end.code in (ExitCode.DONE, ExitCode.YIELDED):
        return
    termination = end.termination
    rank = "" if termination.rank is None else f", rank {termination.rank} first"
    yield "exit code", f"{end.code} ({meaning_of(end.code).meaning}{rank})"
    yield "cause", termination.exception or termination.last_line or ""


def _next(end: AttemptEnd, run_dir: Path) -> str:
    if end.code == ExitCode.DONE:
        return ""
    if end.code == ExitCode.YIELDED:
        return "the same command goes on from the checkpoint"
    log = shlex.quote(str(run_dir / "attempts" / str(end.attempt) / "output.log"))
    if meaning_of(end.code).retry in (RetryClass.APPLICATION, RetryClass.BY_POD_REASON):
        return f"less {log}"  # the table's advice for these codes is about a cluster
    return f"{meaning_of(end.code).way_out}; the whole output: less {log}"
