"""`Job`: a ZeroTrainingJob of the cluster as a record for programs, notebooks and commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from typing import Any, Self

from zerotrain.client.lenient_json import Fields
from zerotrain.contract.text import one_line
from zerotrain.operator.api.hangs import HangStatus, StragglerStatus
from zerotrain.operator.api.lenient import read_leniently
from zerotrain.operator.api.lifecycle import Verification, YieldRequest
from zerotrain.operator.api.memory_plan import MemoryPlan
from zerotrain.operator.api.status import (
    CheckpointRecord,
    Condition,
    Count,
    FailureRecord,
    Phase,
    Restarts,
    ZeroTrainingJobStatus,
)

_COLOURS = {"Completed": "#2e7d32", "Running": "#1565c0", "Failed": "#c62828", "Stalled": "#c62828"}
_STYLE = "border-collapse:collapse;font-family:sans-serif;font-size:13px"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One job as the API server returned it. Ask the client again for a newer state."""

    name: str
    namespace: str
    uid: str
    created: datetime | None
    phase: str
    """Phase that the operator has set; empty before its first pass."""
    attempt: int
    """Number of the attempt, counted from 1; 0 before the first."""
    step: int
    """Optimizer steps done, over all attempts."""
    total_steps: int | None
    loss: float | None
    tokens_per_second: float | None
    step_seconds: float | None
    step_flops: float | None
    """Floating-point operations of the model in one step of all ranks."""
    mfu: float | None
    """Model FLOPs utilisation, at most 1; None where the devices' peak is not known."""
    activity: str
    """Activity that rank 0 last reported: init, first_step, step, checkpoint and so on."""
    last_step_time: datetime | None
    start_time: datetime | None
    attempt_start_time: datetime | None
    next_attempt_time: datetime | None
    """End of the hold-off before the next attempt."""
    completion_time: datetime | None
    workers: Count
    ranks: Count
    ranks_per_worker: int
    zero_stage: int | None
    suspended: bool
    """Value of spec.suspend; the phase says how far the suspension is."""
    conditions: tuple[Condition, ...]
    failures: tuple[FailureRecord, ...]
    """Failures, newest first."""
    restarts: Restarts
    last_checkpoint: CheckpointRecord | None
    resumed_from_step: int | None
    verification: Verification | None
    memory_plan: MemoryPlan | None
    hang: HangStatus | None
    straggler: StragglerStatus | None
    yield_request: YieldRequest | None
    excluded_nodes: tuple[str, ...]
    status: ZeroTrainingJobStatus = field(repr=False, compare=False)
    """The whole status, as far as this version knows it."""
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    """The whole object."""

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """Make the record from the API server's JSON, whichever version of the operator wrote the status."""
        job = Fields(raw)
        meta, spec = job.part("metadata"), job.part("spec")
        status = read_leniently(ZeroTrainingJobStatus, raw.get("status"))
        progress, checkpoint = status.progress, status.checkpoint
        return cls(
            name=meta.text("name"),
            namespace=meta.text("namespace"),
            uid=meta.text("uid"),
            created=meta.moment("creationTimestamp"),
            phase=str(status.phase or ""),
            attempt=status.attempt,
            step=progress.step,
            total_steps=spec.whole("steps") or progress.total_steps or None,
            loss=progress.loss,
            tokens_per_second=progress.tokens_per_second,
            step_seconds=progress.step_seconds,
            step_flops=progress.step_flops,
            mfu=progress.mfu,
            activity=progress.phase,
            last_step_time=progress.last_step_time,
            start_time=status.start_time,
            attempt_start_time=status.attempt_start_time,
            next_attempt_time=status.next_attempt_time,
            completion_time=status.completion_time,
            workers=status.workers,
            ranks=status.ranks,
            ranks_per_worker=_ranks_per_worker(spec),
            zero_stage=status.zero_stage,
            suspended=spec.flag("suspend"),
            conditions=status.conditions,
            failures=status.failures,
            restarts=status.restarts,
            last_checkpoint=checkpoint.last,
            resumed_from_step=checkpoint.resumed_from_step,
            verification=checkpoint.verification,
            memory_plan=status.memory_plan,
            hang=status.hang,
            straggler=status.straggler,
            yield_request=status.yield_request,
            excluded_nodes=tuple(item.name for item in status.excluded_nodes),
            status=status,
            raw=raw,
        )

    def condition(self, kind: str) -> Condition | None:
        """Return the condition of this type, or None."""
        return next((item for item in self.conditions if item.type == kind), None)

    @property
    def is_finished(self) -> bool:
        """Return whether the job is completed or failed: nothing of it runs any more."""
        return self.phase in (Phase.COMPLETED, Phase.FAILED)

    @property
    def num_workers(self) -> int:
        """Return the number of workers of the current attempt, or the requested number before there is
        one."""
        return self.workers.desired or Fields(self.raw).part("spec").count("workers")

    @property
    def spec(self) -> Mapping[str, Any]:
        found = self.raw.get("spec")
        return found if isinstance(found, Mapping) else {}

    @property
    def is_unread(self) -> bool:
        """Return whether the spec is too large or too deep to be read; the condition Stalled says which."""
        return "unread" in self.raw

    @property
    def reference(self) -> str:
        """Return namespace and name for messages, such as `ml/gpt`."""
        return f"{self.namespace}/{self.name}"

    def _repr_html_(self) -> str:
        return job_html(self)


def _ranks_per_worker(spec: Fields) -> int:
    """Return the number of ranks per worker as the operator defaults it: one for each GPU."""
    return spec.whole("ranksPerWorker") or spec.part("resources").part("gpus").whole("count") or 1


def command(job: Job, verb: str, options: str = "") -> str:
    """Return a command about the job that names its namespace, whatever the reader's context is."""
    return f"zerotrain {verb} {job.name} -n {job.namespace}{f' {options}' if options else ''}"


def job_html(job: Job) -> str:
    """Return the HTML of a small table, for a notebook. Everything in it is escaped, as it may be hostile."""
    colour = _COLOURS.get(job.phase, "#6d4c41")
    rows = "".join(
        f'<tr><th style="text-align:left;padding:2px 12px 2px 0">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in _facts(job)
        if value
    )
    bar = _bar(job, colour)
    title = f'<b>{escape(job.reference)}</b> <span style="color:{colour}">{escape(job.phase or "new")}</span>'
    return f'<div style="{_STYLE}">{title}{bar}<table style="{_STYLE}">{rows}</table></div>'


def _facts(job: Job) -> list[tuple[str, str]]:
    failure = job.failures[0] if job.failures else None
    last = job.last_checkpoint
    return [
        ("step", f"{job.step}" + (f" of {job.total_steps}" if job.total_steps else "")),
        ("loss", f"{job.loss:.4f}" if job.loss is not None else ""),
        ("tokens/s", f"{job.tokens_per_second:,.0f}" if job.tokens_per_second else ""),
        ("MFU", f"{job.mfu:.1%}" if job.mfu else ""),
        ("attempt", str(job.attempt) if job.attempt else ""),
        ("ranks", f"{job.ranks.ready} of {job.ranks.desired} ready" if job.ranks.desired else ""),
        ("checkpoint", f"step {last.step} in {one_line(last.path, 200)}" if last is not None else ""),
        ("restarts", str(job.restarts.total) if job.restarts.total else ""),
        ("last failure", f"{failure.reason}: {one_line(failure.message, 200)}" if failure else ""),
    ]


def _bar(job: Job, colour: str) -> str:
    if not job.total_steps:
        return ""
    percent = min(100.0, 100.0 * job.step / job.total_steps)
    return (
        '<div style="background:#e0e0e0;width:320px;height:6px;margin:4px 0">'
        f'<div style="background:{colour};width:{percent:.1f}%;height:6px"></div></div>'
    )
