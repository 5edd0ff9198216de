"""`zerotrain logs`: the output of the ranks, and the kept output of ranks whose pods are gone."""

from __future__ import annotations

from typing import Annotated

import typer

from zerotrain.cli.options import JobArgument, Target, cluster_command, usage_error
from zerotrain.cli.output import print_message
from zerotrain.contract.text import printable

EXAMPLE = "Example: zerotrain logs gpt --rank 0,4-7 -f"
MAX_RANKS = 100_000
MAX_FOLLOWED = 64
"""Copy of the value in `client.log_stream`, so that the help of a command need not import that module."""


@cluster_command
def logs(
    target: Target,
    job: JobArgument,
    rank: Annotated[
        list[str] | None, typer.Option("--rank", metavar="N[,N-M]", help="Ranks; all unless given.")
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option("--attempt", min=1, help="An attempt's number; the current one unless given."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Keep printing new lines, also of the next attempts.")
    ] = False,
    tail: Annotated[
        int | None,
        typer.Option("--tail", min=0, help="Only the last N lines of each worker, or of each --rank."),
    ] = None,
    max_log_requests: Annotated[
        int, typer.Option("--max-log-requests", min=1, help="With -f: maximum workers to follow.")
    ] = MAX_FOLLOWED,
    timestamps: Annotated[bool, typer.Option(help="Print when its node received each line.")] = False,
    prefix: Annotated[
        bool | None,
        typer.Option(help="Print its rank before each line; unless given, if there are several ranks."),
    ] = None,
) -> None:
    """Print the log lines of all or some ranks, of the current or an earlier attempt, in the order of time.

    Control characters are shown as '?'.

    The lines are deleted with their pods: those of a failed attempt when the next one begins, those of a
    finished job by spec.runPolicy.cleanPodPolicy. After that the command prints what the operator kept, with
    a note: for each of the newest 10 attempts in which a rank failed, the last 100 lines (40 KiB at most) of
    that rank. The operator keeps no lines of other ranks, of attempts without a failure, and of lost nodes.
    To keep all lines, a cluster needs a log collector (Loki, Elasticsearch, or that of a cloud); pods have
    the labels zerotrain.dev/job and zerotrain.dev/attempt.
    """
    ranks = parse_ranks(rank)
    several = prefix if prefix is not None else ranks is None or len(ranks) != 1
    lines = target.client.logs(
        job,
        ranks=ranks,
        attempt=attempt,
        follow=follow,
        tail=tail,
        max_followed=max_log_requests,
        on_problem=print_message,
    )
    shown = 0
    for line in lines:
        shown += 1
        stamp = f"{line.time:%Y-%m-%dT%H:%M:%S.%f} " if timestamps and line.time is not None else ""
        who = f"[rank {line.rank}] " if line.rank is not None else f"[worker {line.worker}] "
        typer.echo(f"{stamp}{who if several else ''}{printable(line.text)}")
    if not shown:
        print_message(f"no lines{' of these ranks' if ranks is not None else ''}")


def parse_ranks(texts: list[str] | None) -> list[int] | None:
    """Parse the ranks of all `--rank` options, such as `0,4-7`. Raises CliError."""
    if not texts:
        return None
    found: list[int] = []
    for part in ",".join(texts).split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isascii() and end.isdigit() and len(end) < 8 for end in ends):
            raise usage_error(f"--rank {part!r} is no rank", "write ranks such as 0, 4-7 or 0,4-7")
        start, end = int(ends[0]), int(ends[1])
        if end < start or end - start >= MAX_RANKS:
            raise usage_error(f"--rank {part!r} is no range", "write ranks such as 0, 4-7 or 0,4-7")
        found += range(start, end + 1)
    return sorted(set(found))
