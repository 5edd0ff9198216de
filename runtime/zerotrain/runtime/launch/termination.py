"""Composes and writes the container's termination message: the first information for a user about a
failure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zerotrain.contract.progress import RankEnd, Termination
from zerotrain.runtime.launch.container_exit import RankExit
from zerotrain.runtime.launch.log import say
from zerotrain.runtime.launch.rank_table import RankTable


def compose(
    code: int, failed: Sequence[RankExit], rank_table: RankTable, *, last_line: str | None
) -> Termination:
    """Compose the reason why the worker ended with `code`; where no rank failed, the step it reached and its
    durable checkpoint. The first of `failed` is the rank to blame."""
    report = rank_table.report()
    culprit = failed[0] if failed else None
    slowest = report.slowest
    resumed = next((rank for rank in report.ranks if rank.resumed_from is not None), None)
    return Termination(
        attempt=report.attempt,
        code=code,
        rank=None if culprit is None else culprit.rank,
        signal=None if culprit is None else culprit.signal,
        exception=None if culprit is None else rank_table.failure_of(culprit.rank)[0],
        last_line=None if culprit is None else last_line,
        step=0 if slowest is None else slowest.step,
        resumed_from=None if resumed is None else resumed.resumed_from,
        resumed_job=None if resumed is None else resumed.resumed_job,
        checkpoint=report.checkpoint,
        also_failed=tuple(
            RankEnd(rank=item.rank, code=item.code, reason=rank_table.failure_of(item.rank)[0] or "")
            for item in failed[1:]
        ),
    )


def write(path: Path | None, message: Termination) -> None:
    """Write the file in place (the kubelet mounts it). A failure to write it must not change the exit
    code."""
    if path is None:
        return
    try:
        path.write_text(message.to_json())
    except OSError as error:
        say(f"termination message not written to {path}: {error}")
