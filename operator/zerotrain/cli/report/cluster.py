"""A report about a job in a cluster, from its object and the history that its first worker serves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.cli.explain.reasons import meaning_of_reason
from zerotrain.cli.report.facts import (
    CheckpointRow,
    FailureRow,
    Mark,
    MemoryRow,
    Report,
    Span,
    Tone,
    marks_of,
    memory_of,
    spans_of,
)
from zerotrain.cli.report.folders import checkpoint_rows, facts_of, summary_of
from zerotrain.client.plan_text import estimate_text, margin_text, used_tiers
from zerotrain.contract.history import (
    HISTORY_DIR,
    AttemptHistory,
    History,
    read_folder,
    read_lines,
)
from zerotrain.contract.worker_http import HISTORY_PATH

if TYPE_CHECKING:
    from zerotrain.client import Client, Job
    from zerotrain.operator.api.memory_plan import MemoryPlan

_TIERS = {"gpu": "GPU, planned whole", "host": "host memory, planned whole", "nvme": "NVMe volume"}


def of_job(client: Client, name: str, *, history_folder: Path | None) -> Report:
    """Gather the report of a job by name. Raises ClientError.

    `history_folder` is the job's checkpoint folder if it is mounted on this machine; otherwise the history is
    requested from the job's first worker.
    """
    from zerotrain.client.errors import ClientError

    job = client.get(name)
    notes: list[str] = []
    rows: Sequence[CheckpointRow] = ()
    if history_folder is not None:
        history = read_folder(history_folder / HISTORY_DIR, job_uid=job.uid)
        rows = checkpoint_rows(history_folder, history)
    else:
        try:
            text = client.worker_text(name, HISTORY_PATH)
        except ClientError as error:
            text = None
            message = "; ".join(part for part in (str(error), error.next_step) if part)
            notes.append(f"The history could not be read: {message}")
        history = read_lines((text or "").splitlines())
    if not history.attempts:
        notes.append(_missing(job, is_given=history_folder is not None))
    return _composed(job, history, rows or _last_checkpoint(job), client.transport.server.url, notes)


def _composed(
    job: Job, history: History, rows: Sequence[CheckpointRow], url: str, notes: list[str]
) -> Report:
    attempts = history.attempts
    if history.unreadable:
        notes.append(f"{history.unreadable} lines of the history could not be read and are left out.")
    failed = {failure.attempt: failure for failure in job.failures}
    return Report(
        name=job.name,
        source=f"namespace {job.namespace}, {url}",
        state=job.phase or "Not seen by the operator",
        tone=_tone(job),
        summary=_summary(job, attempts),
        facts=tuple(_facts(job, attempts)),
        attempts=attempts,
        spans=tuple(_spans(job, attempts)),
        marks=(
            *marks_of(attempts),
            *(
                Mark(time=_seconds(item.time), kind="failure", attempt=item.attempt)
                for item in failed.values()
                if item.time is not None
            ),
        ),
        checkpoints=tuple(rows),
        memory=(*_planned(job), *memory_of(attempts)),
        failures=tuple(_failures(job)),
        conditions=tuple((item.type, item.status, item.reason, item.message) for item in job.conditions),
        notes=tuple(notes),
    )


def _missing(job: Job, *, is_given: bool) -> str:
    if is_given:
        return "There are no curves: the folder holds no history of this job."
    if job.is_finished or job.workers.running == 0:
        return (
            "There are no curves: no worker runs. The history is in the folder of the checkpoints; mount "
            "their volume and give the job's folder: "
            f"zerotrain report {job.name} --history FOLDER."
        )
    return (
        "There are no curves yet: the built-in trainer writes the history from its first step on; other "
        "programs write none."
    )


def _tone(job: Job) -> Tone:
    if job.phase in ("Failed", "Stalled") or job.hang is not None:
        return Tone.BAD
    return Tone.GOOD if job.phase in ("Completed", "Running") else Tone.WAIT


def _summary(job: Job, attempts: Sequence[AttemptHistory]) -> str:
    if attempts:
        return summary_of(attempts)
    total = f" of {job.total_steps}" if job.total_steps else ""
    loss = "" if job.loss is None else f", loss {job.loss:.4g}"
    return f"Step {job.step}{total}{loss}."


def _facts(job: Job, attempts: Sequence[AttemptHistory]) -> list[tuple[str, str]]:
    restarts = job.restarts
    rows = [
        ("attempt", str(job.attempt)),
        ("workers", str(job.num_workers)),
        (
            "restarts",
            f"{restarts.total} (application {restarts.app}, infrastructure {restarts.infra}, "
            f"preemption {restarts.preemption})",
        ),
    ]
    if job.memory_plan is not None:
        rows += _plan_facts(job.memory_plan)
    if job.excluded_nodes:
        rows.append(("excluded nodes", ", ".join(job.excluded_nodes)))
    known = {name for name, _ in rows} | {"attempts"}
    return [*rows, *(row for row in facts_of(attempts) if row[0] not in known)]


def _plan_facts(plan: MemoryPlan) -> list[tuple[str, str]]:
    margins = ((tier, margin_text(plan, tier)) for tier, _, _ in used_tiers(plan))
    left = [f"{tier} {margin}" for tier, margin in margins if margin]
    rows = [("memory plan", "; left: ".join(filter(None, (plan.verdict, ", ".join(left)))))]
    estimate = estimate_text(plan)
    return [*rows, ("a step, by data sheet", estimate)] if estimate else rows


def _spans(job: Job, attempts: Sequence[AttemptHistory]) -> list[Span]:
    """Return the attempts' spans from the history, or else from the starts and ends in the status."""
    spans = spans_of(attempts)
    by_attempt = {item.attempt: item for item in job.failures}
    shown = []
    for span in spans:
        failure = by_attempt.get(span.attempt)
        text, tone = (failure.reason, Tone.BAD) if failure is not None else (span.text, span.tone)
        end = max(span.end, _seconds(failure.time)) if failure is not None else span.end
        shown.append(Span(attempt=span.attempt, start=span.start, end=end, tone=tone, text=text))
    if not shown and job.attempt_start_time is not None:
        end = _seconds(job.completion_time) or time.time()
        start = _seconds(job.attempt_start_time)
        shown.append(Span(attempt=job.attempt, start=start, end=end, tone=_tone(job), text=job.phase))
    return shown


def _planned(job: Job) -> list[MemoryRow]:
    plan = job.memory_plan
    return [
        MemoryRow(
            name=_TIERS.get(tier, tier), planned=planned, measured=measured, planned_by="memory planner"
        )
        for tier, planned, measured in (used_tiers(plan) if plan is not None else ())
    ]


def _last_checkpoint(job: Job) -> list[CheckpointRow]:
    last = job.last_checkpoint
    if last is None:
        return []
    return [
        CheckpointRow(
            step=last.step,
            attempt=str(last.attempt or ""),
            time=_seconds(last.time) or None,
            num_bytes=None,
            seconds=None,
            state="durable" if last.durable else "not yet durable",
            tone=Tone.GOOD if last.durable else Tone.WAIT,
            name=last.path,
        )
    ]


def _failures(job: Job) -> list[FailureRow]:
    rows = []
    for item in job.failures:
        meaning = meaning_of_reason(item.reason)
        rank = "" if item.rank is None else f"rank {item.rank}"
        rows.append(
            FailureRow(
                attempt=item.attempt,
                time=_seconds(item.time) or None,
                reason=item.reason,
                where=", ".join(filter(None, (rank, item.pod, item.node))),
                message=item.message or item.last_line,
                way_out=meaning.way_out if meaning is not None else "",
            )
        )
    return rows


def _seconds(moment: datetime | None) -> float:
    return 0.0 if moment is None else moment.timestamp()
