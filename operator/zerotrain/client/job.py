"""`Job`: a ZeroTrainingJob of the cluster as a record for programs, notebooks and commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self

from zerotrain.client.lenient_json import Fields
from zerotrain.operator.api.hangs import HangStatus, StragglerStatus
from zerotrain.operator.api.lenient import read_leniently
from zerotrain.operator.api.lifecycle import Verification
from zerotrain.operator.api.memory_plan import MemoryPlan
from zerotrain.operator.api.status import (
    CheckpointRecord,
    Condition,
    Count,
    Failure,
    Phase,
    Restarts,
    ZeroTrainingJobStatus,
)
from zerotrain.operator.api.yields import YieldRequest


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
    failures: tuple[Failure, ...]
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
        from zerotrain.client.notebook import job_html

        return job_html(self)


def _ranks_per_worker(spec: Fields) -> int:
    """Return the number of ranks per worker as the operator defaults it: one for each GPU."""
    return spec.whole("ranksPerWorker") or spec.part("resources").part("gpus").whole("count") or 1


def command(job: Job, verb: str, options: str = "") -> str:
    """Return a command about the job that names its namespace, whatever the reader's context is."""
    return f"zerotrain {verb} {job.name} -n {job.namespace}{f' {options}' if options else ''}"
