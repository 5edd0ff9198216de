"""The last lines of a local run: the result, where it is stored, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console

from zerotrain.cli.local.attempt import AttemptEnd
from zerotrain.client.localrun import LocalRun
from zerotrain.contract.exit_codes import ExitCode, RetryClass, meaning_of
from zerotrain.contract.progress import CheckpointProgress


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
