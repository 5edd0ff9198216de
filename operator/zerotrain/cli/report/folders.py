"""A report from a folder: that of a local run (`runs/NAME`), or one with checkpoints.

A training program can write there, so the size of every file is bounded, and a file that cannot be read
becomes a note on the page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zerotrain.cli.errors import CliError
from zerotrain.cli.report.facts import (
    CheckpointRow,
    FailureRow,
    Mark,
    Report,
    Span,
    Tone,
    kept_points,
    marks_of,
    memory_of,
    spans_of,
    totals,
)
from zerotrain.contract.exit_codes import ExitCode, meaning_of
from zerotrain.contract.history import HISTORY_DIR, AttemptHistory, History, read_folder
from zerotrain.contract.progress import Termination
from zerotrain.contract.regular_file import read_regular
from zerotrain.contract.strict_json import read_json

RUN_FILE = "run.json"
MAX_JSON_BYTES = 64 << 10
MAX_ATTEMPTS = 200

_JOB_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
"""Form of a job's name, as Kubernetes requires it."""

NO_HISTORY = (
    "There are no curves: no history was found. The built-in trainer writes it into the folder of the "
    "checkpoints; other programs write none."
)


def of_folder(folder: Path) -> Report:
    """Gather the report of a run's folder or a checkpoint folder. Raises CliError when it is neither."""
    if (folder / RUN_FILE).is_file():
        return _of_run(folder)
    found = _checkpoint_folder(folder)
    history = read_folder(found / HISTORY_DIR)
    rows = checkpoint_rows(found, history)
    if not history.attempts and not rows:
        raise CliError(
            f"{folder} is neither the folder of a run nor one with checkpoints",
            next_step="give runs/NAME, the job's checkpoint folder, or the name of a job in the cluster",
        )
    name = history.attempts[-1].record.job if history.attempts else folder.name
    return _composed(name, folder, history, rows)


def _of_run(folder: Path) -> Report:
    job = str(_json(folder / RUN_FILE).get("job", folder.name))
    # The record is not trusted: its job may be any text, such as a path to another user's folder.
    place = folder / "checkpoints" / job if _JOB_NAME.fullmatch(job) else None
    history = _all_histories([*([place] if place else []), *_attempt_folders(folder)])
    rows = checkpoint_rows(place, history) if place and place.is_dir() else ()
    report = _composed(job, folder, history, rows)
    ends = _terminations(folder)
    if not ends:
        return report
    last = max(ends, key=lambda end: end.attempt)
    newest_known = max((item.record.attempt for item in history.attempts), default=0)
    if newest_known > last.attempt:  # a later attempt still runs, or was killed with its launcher
        return replace(report, failures=tuple(_failures(ends, history)))
    state, tone = _state(last.code)
    summary = f"Attempt {last.attempt} ended with {last.code}: {meaning_of(last.code).meaning}."
    return replace(
        report,
        state=state,
        tone=tone,
        summary=f"{summary} {report.summary}",
        failures=tuple(_failures(ends, history)),
        spans=tuple(_with_ends(report.spans, ends)),
        marks=(*report.marks, *_failure_marks(ends, history)),
    )


def _composed(name: str, folder: Path, history: History, rows: Sequence[CheckpointRow]) -> Report:
    attempts = history.attempts
    spans = spans_of(attempts)
    tone = spans[-1].tone if spans else Tone.WAIT
    notes = [] if attempts else [NO_HISTORY]
    if history.unreadable:
        notes.append(f"{history.unreadable} lines of the history could not be read and are left out.")
    return Report(
        name=name,
        source=str(folder),
        state={Tone.GOOD: "Stopped in order", Tone.WAIT: "Open", Tone.BAD: "Ended with an error"}[tone],
        tone=tone,
        summary=summary_of(attempts),
        facts=tuple(facts_of(attempts)),
        attempts=attempts,
        spans=tuple(spans),
        marks=tuple(marks_of(attempts)),
        checkpoints=tuple(rows),
        memory=tuple(memory_of(attempts)),
        notes=tuple(notes),
    )


def summary_of(attempts: Sequence[AttemptHistory]) -> str:
    """Return the newest step, and the first and last loss."""
    points = kept_points(attempts)
    if not points:
        return "No step was recorded."
    total = attempts[-1].record.total_steps
    losses = [point.loss for point in points if point.loss is not None]
    text = f"Step {points[-1].step}{f' of {total}' if total else ''}"
    return f"{text}, loss {losses[0]:.4g} to {losses[-1]:.4g}." if losses else f"{text}."


def facts_of(attempts: Sequence[AttemptHistory]) -> list[tuple[str, str]]:
    """Return numbers over all attempts, then the facts that the newest attempt recorded."""
    if not attempts:
        return []
    record, points = attempts[-1].record, kept_points(attempts)
    useful, lost = totals(attempts)
    steps = sum(point.steps for point in points)
    rows = [("attempts", str(len(attempts))), ("ranks", str(record.world_size))]
    if steps and useful:
        rows.append(("seconds a step, mean", f"{useful / steps:.4g}"))
        rows.append(("tokens a second, mean", f"{sum(point.tokens for point in points) / useful:,.0f}"))
        rows += compute_facts(attempts)
        rows.append(("steps done again", f"{lost / (useful + lost):.1%} of the time in steps"))
    nonfinite = sum(point.nonfinite for point in points)
    if nonfinite:
        rows.append(("steps that were not finite", str(nonfinite)))
    return [*rows, *record.facts.items()]


def compute_facts(attempts: Sequence[AttemptHistory]) -> list[tuple[str, str]]:
    """Return the operations of a step and, where the peak of the devices is known, the mean utilisation."""
    points = [point for point in kept_points(attempts) if point.flops]
    if not points:
        return []
    rows = [
        (
            "TFLOP a step, mean",
            f"{sum(point.flops for point in points) / sum(point.steps for point in points) / 1e12:.4g}",
        )
    ]
    rated = [point for point in points if point.peak_flops]
    if rated:
        ratio = sum(point.flops for point in rated) / sum(point.peak_flops for point in rated)
        rows.append(("MFU, mean", f"{ratio:.1%}"))
    return rows


def checkpoint_rows(folder: Path, history: History) -> tuple[CheckpointRow, ...]:
    """Return the checkpoints in the folder, with the seconds that the history gives for each.

    Needs no torch.
    """
    from zerotrain.runtime.checkpoint.inspect import Condition, survey

    try:
        found = survey(folder)
    except OSError:
        return ()
    seconds = {
        event.text: event.seconds
        for item in history.attempts
        for event in item.events
        if event.event == "checkpoint"
    }
    tones = {Condition.WHOLE: Tone.GOOD, Condition.PARTIAL: Tone.WAIT, Condition.DAMAGED: Tone.BAD}
    return tuple(
        CheckpointRow(
            step=row.step or 0,
            attempt="" if row.attempt is None else str(row.attempt),
            time=row.created_at,
            num_bytes=row.num_bytes,
            seconds=seconds.get(row.path.name),
            state=f"{row.condition}{', latest' if row.is_latest else ''}"
            + (f": {row.reason}" if row.reason else ""),
            tone=tones[row.condition],
            name=row.path.name,
        )
        for row in found
    )


def _checkpoint_folder(folder: Path) -> Path:
    """Return the job's checkpoint folder, from that folder itself or from one of its checkpoints."""
    return folder.parent if (folder / "COMMIT").is_file() else folder


def _all_histories(folders: Sequence[Path]) -> History:
    parts = [read_folder(folder / HISTORY_DIR) for folder in folders]
    attempts = sorted((item for part in parts for item in part.attempts), key=lambda item: item.record.time)
    return History(attempts=tuple(attempts), unreadable=sum(part.unreadable for part in parts))


def _attempt_folders(folder: Path) -> list[Path]:
    try:
        found = [path for path in (folder / "attempts").iterdir() if path.name.isdigit()]
    except OSError:
        return []
    return sorted(found, key=lambda path: int(path.name))[-MAX_ATTEMPTS:]


def _terminations(folder: Path) -> list[Termination]:
    found = []
    for path in _attempt_folders(folder):
        try:
            found.append(
                Termination.from_json(read_regular(path / "termination.json", MAX_JSON_BYTES).decode())
            )
        except (OSError, ValueError):
            continue
    return found


def _state(code: int) -> tuple[str, Tone]:
    match code:
        case ExitCode.DONE:
            return "Completed", Tone.GOOD
        case ExitCode.YIELDED:
            return "Stopped on request", Tone.WAIT
    return "Failed", Tone.BAD


def _failed(ends: Sequence[Termination]) -> list[Termination]:
    return [end for end in ends if end.code not in (ExitCode.DONE, ExitCode.YIELDED)]


def _failures(ends: Sequence[Termination], history: History) -> list[FailureRow]:
    times = _end_times(history)
    return [
        FailureRow(
            attempt=end.attempt,
            time=times.get(end.attempt),
            reason=f"exit code {end.code}",
            where="" if end.rank is None else f"rank {end.rank}",
            message=end.exception or end.last_line or meaning_of(end.code).meaning,
            way_out=meaning_of(end.code).way_out,
        )
        for end in reversed(_failed(ends))
    ]


def _failure_marks(ends: Sequence[Termination], history: History) -> list[Mark]:
    times = _end_times(history)
    return [
        Mark(time=times[end.attempt], kind="failure", attempt=end.attempt)
        for end in _failed(ends)
        if end.attempt in times
    ]


def _end_times(history: History) -> dict[int, float]:
    return {span.attempt: span.end for span in spans_of(history.attempts)}


def _with_ends(spans: Sequence[Span], ends: Sequence[Termination]) -> list[Span]:
    codes = {end.attempt: end.code for end in ends}
    shown = []
    for span in spans:
        code = codes.get(span.attempt)
        if code is None:
            shown.append(span)
            continue
        state, tone = _state(code)
        shown.append(replace(span, tone=tone, text=f"{state.lower()} ({code})"))
    return shown


def _json(path: Path) -> dict[str, object]:
    try:
        value = read_json(path, max_bytes=MAX_JSON_BYTES)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
