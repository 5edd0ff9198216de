"""`zerotrain get`: jobs of the cluster, as a table or for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from zerotrain.cli.options import Format, FormatOption, Target, cluster_command, complete_jobs, usage_error
from zerotrain.cli.output import column_widths, print_message, print_objects, show, table_lines
from zerotrain.client.errors import JobNotFoundError
from zerotrain.client.formatting import since

if TYPE_CHECKING:
    from zerotrain.client import Job

EXAMPLE = "Example: zerotrain get -n ml -o wide"

_HEADER = ("NAME", "PHASE", "STEP", "RANKS", "STAGE", "TOKENS/S", "RESTARTS", "CHECKPOINT", "AGE")
_WIDE = ("ATTEMPT", "LOSS", "WORKERS", "WHY")


@cluster_command
def get(
    target: Target,
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB]...", help="Names of jobs; all jobs unless given.", autocompletion=complete_jobs
        ),
    ] = None,
    all_namespaces: Annotated[
        bool, typer.Option("-A", "--all-namespaces", help="List the jobs of all namespaces.")
    ] = False,
    selector: Annotated[
        str | None, typer.Option("-l", "--selector", help="Labels that the jobs have, such as team=a.")
    ] = None,
    output: FormatOption = Format.TABLE,
    watch: Annotated[
        bool, typer.Option("-w", "--watch", help="Keep running, and print jobs that change.")
    ] = False,
) -> None:
    """List jobs with their phase, step, ready ranks, restarts and newest checkpoint.

    -o json, yaml and name are for programs; -o wide adds the loss and why a job does not run.
    """
    if jobs and (all_namespaces or selector):
        raise usage_error("names go neither with --all-namespaces nor with --selector")
    if watch and output not in (Format.TABLE, Format.WIDE):
        raise usage_error(f"--watch prints a table, not {output}")
    found = _find(target, jobs, all_namespaces, selector)
    if output in (Format.TABLE, Format.WIDE):
        if not found and not watch:
            print_message("no jobs" + ("" if all_namespaces else f" in namespace {target.client.namespace}"))
            return
        table = _Table(output, all_namespaces)
        table.show(found)
        if watch:
            _watch(target, jobs or (), all_namespaces, selector, table, found)
        return
    print_objects([job.raw for job in found], output, is_list=not jobs or len(jobs) > 1)


def _find(
    target: Target, names: Sequence[str] | None, all_namespaces: bool, selector: str | None
) -> list[Job]:
    if names:
        return [target.client.get(name) for name in names]
    return target.client.list(all_namespaces=all_namespaces, selector=selector)


def _row(job: Job, form: Format) -> tuple[str, ...]:
    checkpoint = job.last_checkpoint
    row = (
        job.name,
        job.phase or ("Unreadable" if job.is_unread else "-"),
        f"{job.step}/{job.total_steps}" if job.total_steps else str(job.step),
        f"{job.ranks.ready}/{job.ranks.desired}" if job.ranks.desired else "-",
        str(job.zero_stage) if job.zero_stage is not None else "-",
        f"{job.tokens_per_second:,.0f}" if job.tokens_per_second else "-",
        str(job.restarts.total),
        str(checkpoint.step) if checkpoint is not None else "-",
        since(job.created),
    )
    if form is not Format.WIDE:
        return row
    loss = f"{job.loss:.4f}" if job.loss is not None else "-"
    return (*row, str(job.attempt), loss, str(job.num_workers), _why(job))


def _why(job: Job) -> str:
    """Return the reason of the condition that explains the job's phase."""
    kinds = ("Failed", "Stalled", "Hung", "Suspended")
    explaining = [found for kind in kinds if (found := job.condition(kind)) is not None and found.is_true]
    waiting = job.condition("Reconciling")
    if not explaining and waiting is not None and waiting.is_true:
        explaining = [waiting]
    if not explaining and job.is_unread:
        return "InvalidSpec"
    return explaining[0].reason if explaining else "-"


def _watch(
    target: Target,
    names: Sequence[str],
    all_namespaces: bool,
    selector: str | None,
    table: _Table,
    shown: Sequence[Job],
) -> None:
    """Print changed jobs until Ctrl-C, or until every named job is deleted."""
    known = {job.reference: job for job in shown}
    batches = target.client.watch_list(
        names, all_namespaces=all_namespaces, selector=selector, known=known, on_problem=print_message
    )
    for batch in batches:
        changed = [job for key, job in batch.items() if job is not None and known.get(key) != job]
        table.show(changed)
        known |= {job.reference: job for job in changed}
        for reference in [key for key, job in batch.items() if job is None and key in known]:
            del known[reference]
            print_message(f"{reference} was deleted")
        if names and not known:
            raise JobNotFoundError(f"{' and '.join(names)} {'was' if len(names) == 1 else 'were'} deleted")


class _Table:
    """Printer of rows that arrive over time. It repeats the header when a column has to become wider."""

    def __init__(self, form: Format, all_namespaces: bool) -> None:
        self._form, self._all = form, all_namespaces
        self._widths: tuple[int, ...] = ()

    def show(self, jobs: Sequence[Job]) -> None:
        namespaced = ("NAMESPACE",) if self._all else ()
        header = namespaced + _HEADER + (_WIDE if self._form is Format.WIDE else ())
        rows = [((job.namespace,) if self._all else ()) + _row(job, self._form) for job in jobs]
        widths = column_widths(header, rows, self._widths)
        for line in table_lines(header, rows, widths)[0 if widths != self._widths else 1 :]:
            show(line)
        self._widths = widths
