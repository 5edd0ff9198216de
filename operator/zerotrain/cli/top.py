"""`zerotrain top`: the ranks of a job, live on a terminal, as lines anywhere else."""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerotrain.cli.options import JobArgument, Output, OutputOption, Target, cluster_command, usage_error
from zerotrain.cli.output import on_terminal, print_message, show, show_record, table_lines

if TYPE_CHECKING:
    from zerotrain.client.snapshot import Snapshot

EXAMPLE = "Example: zerotrain top gpt"


@cluster_command
def top(
    target: Target,
    job: JobArgument,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two snapshots.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the ranks once as a table, then exit.")] = False,
    count: Annotated[
        int | None, typer.Option(min=1, help="Print this number of lines, then exit; without a live view.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Watch the ranks of a job: phase, step, seconds per step, waits for others, memory of every tier.

    Keys: q quits, s sorts by the slowest rank, p pauses, r refreshes. Without a terminal the command prints
    one line per interval until the job has ended. It calls the workers through the API server, which needs
    the right to get pods/proxy and, where network policies are enforced, the API server's network in the
    chart's jobs.extraHttpCidrs. Without them it shows the values in the job's status: rank 0, and a rank that
    delays it.
    """
    from zerotrain.client.snapshot import SnapshotPoller, take

    if output is not Output.TABLE and not once:
        raise usage_error(f"-o {output} prints one snapshot: give --once", "zerotrain top JOB --once -o json")
    if once and output is not Output.TABLE:
        show_record(as_record(take(target.client, job)), output)
    elif once:
        _print_table(take(target.client, job))
    elif count is not None or not on_terminal():
        _print_lines(target, job, every, count)
    else:
        from zerotrain.cli.top_app import TopApp

        client = target.client
        poller = SnapshotPoller(client, job)
        first = poller.take()  # may raise, so before the view takes the screen
        problem = TopApp(poller.take, first=first, every_s=every).run()
        if problem:
            print_message(problem)


def as_record(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot for programs: sizes in bytes, times in seconds, null for unreported values."""
    job = snapshot.job
    return {
        "name": job.name,
        "namespace": job.namespace,
        "phase": job.phase,
        "attempt": job.attempt,
        "step": job.step,
        "time": snapshot.time.isoformat(),
        "is_kept": snapshot.is_kept,
        "problem": snapshot.problem,
        "ranks": [asdict(row) for row in snapshot.rows],
        "tiers": [asdict(row) for row in snapshot.tiers],
    }


def _print_table(snapshot: Snapshot) -> None:
    from zerotrain.cli.top_table import COLUMNS, cells, one_line

    show(one_line(snapshot))
    if snapshot.rows:
        for line in table_lines(COLUMNS, [cells(row) for row in snapshot.rows]):
            show(line)


def _print_lines(target: Target, job: str, every_s: float, count: int | None) -> None:
    from zerotrain.cli.top_table import one_line
    from zerotrain.client.snapshot import SnapshotPoller

    poller = SnapshotPoller(target.client, job)
    for number in itertools.count(1):
        snapshot = poller.take()
        show(one_line(snapshot))
        if snapshot.job.is_finished or number == count:
            return
        time.sleep(every_s)
