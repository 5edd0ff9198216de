"""`zerotrain describe`: what happened to a job and what to do next, in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from zerotrain.cli.options import Format, JobArgument, Target, cluster_command, usage_error
from zerotrain.cli.output import as_yaml, print_message, table_lines
from zerotrain.client.formatting import since, size
from zerotrain.contract.strict_json import own_json
from zerotrain.contract.text import printable, printable_lines

if TYPE_CHECKING:
    from rich.console import Console

    from zerotrain.client import Job, Pod
    from zerotrain.client.diagnosis import Diagnosis, Happening

EXAMPLE = "Example: zerotrain describe gpt"
MAX_HAPPENINGS = 20
MAX_PODS = 16
MAX_TEXT_CHARS = 600


@cluster_command
def describe(
    target: Target,
    job: JobArgument,
    output: Annotated[
        Format,
        typer.Option(
            "-o",
            "--output",
            help="wide also prints all pods, conditions and events; json and yaml are for programs.",
        ),
    ] = Format.TABLE,
) -> None:
    """Print the present state of a job, its history, and what to do next.

    The command reads the job's status, events and pods. It prints failures with their first rank, node and
    exit code, hangs and stragglers, checkpoints, the planned and the observed memory, and what a waiting job
    waits for.
    """
    from zerotrain.client.diagnosis import diagnose
    from zerotrain.client.errors import ForbiddenError

    if output is Format.NAME:
        raise usage_error("describe prints a text; -o name goes with zerotrain get")
    client = target.client
    found = client.get(job)
    try:
        events, pods = client.events(job, pods=True), client.pods(job)
    except ForbiddenError as error:
        print_message(f"only the job itself can be read: {error}")
        events, pods = [], []
    diagnosis = diagnose(found, events, pods)
    if output in (Format.JSON, Format.YAML):
        _print_record(found, diagnosis, output)
    else:
        _print_text(found, pods, diagnosis, wide=output is Format.WIDE)


def _print_record(job: Job, diagnosis: Diagnosis, form: Format) -> None:
    import json
    from dataclasses import asdict

    record = {"name": job.name, "namespace": job.namespace, "phase": job.phase, **asdict(diagnosis)}
    text = json.dumps(record, indent=2, default=_plain)
    typer.echo(text if form is Format.JSON else as_yaml(own_json(text)).rstrip("\n"))


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _print_text(job: Job, pods: list[Pod], diagnosis: Diagnosis, *, wide: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    style = {"Failed": "bold red", "Stalled": "bold red", "Completed": "bold green"}.get(job.phase, "bold")
    console.print(printable(diagnosis.headline), style=style, markup=False)
    console.print(
        f"namespace {job.namespace}, phase {job.phase or '-'}, {since(job.created)} old", markup=False
    )
    _section(console, "Now", [f"- {line}" for text in diagnosis.situation for line in _lines(text)])
    _section(console, "Memory of one rank", _memory(job))
    if wide or not job.is_finished:
        _section(console, "Pods", _pods(pods, wide=wide))
    _section(console, "What happened", list(_happenings(diagnosis.happenings, wide=wide)))
    if wide:
        _section(console, "Conditions", _conditions(job))
    advice = [
        line
        for number, item in enumerate(diagnosis.advice, 1)
        for line in (f"{number}. {item.text}", *([f"   $ {item.command}"] if item.command else []))
    ]
    _section(console, "What to do next", advice or ["Nothing: the job needs no action."])


def _section(console: Console, title: str, lines: list[str]) -> None:
    if not lines:
        return
    console.print()
    console.print(title, style="bold underline", markup=False)
    for line in lines:
        console.print(f"  {printable(line)}", markup=False)


def _lines(text: str) -> list[str]:
    """Split a text into its lines without the empty ones, each of at most MAX_TEXT_CHARS characters."""
    return [line[:MAX_TEXT_CHARS] for line in printable_lines(text) if line.strip()] or [""]


def _memory(job: Job) -> list[str]:
    from zerotrain.client.plan_text import estimate_text, margin_text, used_tiers

    plan = job.memory_plan
    if plan is None or not used_tiers(plan):
        return []
    rows = [
        (tier, _bytes(planned), _bytes(observed), margin_text(plan, tier) or "-")
        for tier, planned, observed in used_tiers(plan)
    ]
    ranks = f", {plan.ranks} ranks" if plan.ranks else ""
    lines = [*table_lines(("TIER", "PLANNED", "TAKEN", "LEFT BY THE PLAN"), rows)]
    lines.append(f"fit: {plan.verdict or 'unknown'}{ranks}")
    if estimate := estimate_text(plan):
        taken = f"; now {job.step_seconds:.3g} s" if job.step_seconds else ""
        lines.append(f"a step, by data sheet: {estimate}{taken}")
    return lines


def _bytes(value: int | None) -> str:
    return size(value) if value is not None else "-"


def _pods(pods: list[Pod], *, wide: bool) -> list[str]:
    """Return a table of all pods with `wide`, else of at most MAX_PODS that are not running and ready."""
    chosen = pods if wide else [pod for pod in pods if not (pod.is_running and pod.ready)]
    rows = [
        (
            pod.name,
            str(pod.worker) if pod.worker is not None else pod.helper or "-",
            pod.phase + (", deleting" if pod.deleting else ""),
            "yes" if pod.ready else "no",
            str(pod.exit_code) if pod.exit_code is not None else "-",
            pod.reason or "-",
            pod.node or "-",
            since(pod.created),
        )
        for pod in (chosen if wide else chosen[:MAX_PODS])
    ]
    if not rows:
        return []
    left = len(chosen) - len(rows)
    header = ("POD", "WORKER", "PHASE", "READY", "EXIT", "REASON", "NODE", "AGE")
    return [*table_lines(header, rows), *([f"... and {left} more (-o wide)"] if left else [])]


def _happenings(happenings: tuple[Happening, ...], *, wide: bool) -> Iterator[str]:
    shown = happenings if wide else happenings[-MAX_HAPPENINGS:]
    if len(shown) < len(happenings):
        yield f"... {len(happenings) - len(shown)} earlier ones (-o wide)"
    for item in shown:
        time = f"{item.time.astimezone():%m-%d %H:%M:%S}" if item.time is not None else " " * 14
        first, *rest = _lines(item.title)
        yield f"{time} {'!' if item.is_bad else ' '} {first}"
        for line in (*rest, *(line for text in item.details for line in _lines(text))):
            yield f"{' ' * 17}{line}"


def _conditions(job: Job) -> list[str]:
    rows = [
        (item.type, item.status, item.reason, since(item.last_transition_time), item.message or "-")
        for item in job.conditions
    ]
    return table_lines(("TYPE", "STATUS", "REASON", "SINCE", "MESSAGE"), rows) if rows else []
