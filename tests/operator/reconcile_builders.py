"""Builders of jobs, pods and observations, so that a row of a reconcile table fits a few lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from zerotrain.contract.progress import CheckpointProgress, Progress, Termination
from zerotrain.contract.progress import Phase as RankPhase
from zerotrain.operator.api import ZeroTrainingJobStatus
from zerotrain.operator.reconcile import Action, Observed, Plan, PodView, reconcile

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
UID = "11111111-2222-3333-4444-555555555555"
ALL = (0, 1)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def stamp(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def job(
    *,
    spec: Mapping[str, Any] | None = None,
    status: Mapping[str, Any] | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    """Return a job of two workers with a checkpoint volume; `spec` and `status` are laid over it."""
    base = {
        "workers": 2,
        "image": "localhost/zerotrain:dev",
        "config": {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1},
        "model": {"gpt": {"dModel": 64, "layers": 2, "heads": 2, "context": 64}},
        "data": {"path": "builtin:python-stdlib"},
        "steps": 100,
        "checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "ckpt"}}, "gracePeriodSeconds": 60},
    }
    return {
        "apiVersion": "zerotrain.dev/v1alpha1",
        "kind": "ZeroTrainingJob",
        "metadata": {"name": "gpt", "namespace": "ml", "uid": UID, "generation": 1, **metadata},
        "spec": {**base, **(spec or {})},
        "status": dict(status or {}),
    }


def status(phase: str, attempt: int = 1, **more: Any) -> dict[str, Any]:
    """Return a status as stored; pods count as created unless the row says otherwise."""
    return {"phase": phase, "attempt": attempt, "podsCreated": True, "startTime": stamp(ago(600)), **more}


def restarts(
    cause: str, *seconds_ago: float, reason: str = "RankFailed", steps: Sequence[int] = ()
) -> dict[str, Any]:
    """Return status.restarts with one recent entry per given age; the step grows unless given."""
    gained = list(steps) or [10 * (number + 1) for number in range(len(seconds_ago))]
    recent = [
        {"time": stamp(ago(age)), "cause": cause, "attempt": number + 1, "reason": reason, "step": step}
        for number, (age, step) in enumerate(zip(seconds_ago, gained, strict=True))
    ]
    return {cause: len(recent), "total": len(recent), "recent": recent}


def pending(index: int, attempt: int = 1, **more: Any) -> PodView:
    return PodView(
        name=f"gpt-{attempt}-{index}", uid=f"pod-{attempt}-{index}", attempt=attempt, index=index, **more
    )


def running(index: int, attempt: int = 1, **more: Any) -> PodView:
    fields = {
        "phase": "Running",
        "node": f"node-{index}",
        "pod_ip": f"10.0.0.{index}",
        "scheduled": True,
        "started": True,
    }
    return pending(index, attempt, **{**fields, **more})


def ready(index: int, attempt: int = 1, **more: Any) -> PodView:
    return running(index, attempt, **{"ready": True, **more})


def going(index: int, attempt: int = 1, *, grace_s: int = 60, asked_s_ago: float = 0, **more: Any) -> PodView:
    """Return a ready pod that a client other than the operator is deleting."""
    ends = ago(asked_s_ago) + timedelta(seconds=grace_s)
    return ready(index, attempt, **{"deletion_at": ends, "deletion_grace_s": grace_s, **more})


def ended(index: int, code: int, attempt: int = 1, *, s_ago: float = 5, **more: Any) -> PodView:
    fields = {
        "phase": "Succeeded" if code == 0 else "Failed",
        "ready": False,
        "exit_code": code,
        "finished_at": ago(s_ago),
        "ended_seen_at": ago(s_ago),
    }
    return running(index, attempt, **{**fields, **more})


def last_words(code: int, attempt: int = 1, *, step: int | None = None, **more: Any) -> Termination:
    """Return a termination message; with `step`, one that knows a durable checkpoint."""
    saved = (
        None if step is None else CheckpointProgress(step=step, path=f"/ckpt/{step}", time=ago(3).timestamp())
    )
    return Termination(attempt=attempt, code=code, checkpoint=saved, **more)


def progress(step: int, attempt: int = 1, *, saved: int | None = None, **more: Any) -> Progress:
    checkpoint = (
        None
        if saved is None
        else CheckpointProgress(step=saved, path=f"/ckpt/{saved}", time=ago(20).timestamp())
    )
    fields = {"phase": RankPhase.STEP, "total_steps": 100, "heartbeat_at": ago(1).timestamp()}
    fields |= {"step_at": ago(1).timestamp(), "checkpoint": checkpoint}
    return Progress(rank=0, attempt=attempt, step=step, **{**fields, **more})


def seen(*pods: PodView, **more: Any) -> Observed:
    return Observed(pods=pods, synced_at=more.pop("synced_at", ago(3600)), **more)


@dataclass(frozen=True, kw_only=True)
class Want:
    """Expected properties of the plan; those that are not named are free."""

    phase: str | None = None
    attempt: int | None = None
    actions: tuple[Action, ...] | None = None
    events: tuple[str, ...] | None = None
    """Reasons of the events, in order."""
    conditions: Mapping[str, tuple[str, str] | None] | None = None
    """Type -> (status, reason); None where there must be no such condition."""
    fields: Mapping[str, Any] | None = None
    """Dotted path below status, in the API's spelling -> value (absent fields are None)."""
    messages: Mapping[str, str] | None = None
    """Condition type, or `event`, -> text its message contains."""
    wake_in_s: float | None = None
    writes: bool | None = None
    """Whether there is a status write at all."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case: a job, what is observed, and the plan that must come out."""

    id: str
    job: dict[str, Any]
    seen: Observed
    want: Want
    now: datetime = NOW


def run(row: Row) -> tuple[Plan, dict[str, Any]]:
    """Return the plan, and the status after it as JSON, as the API server would store it."""
    plan = reconcile(row.job, row.seen, row.now)
    after = plan.status or ZeroTrainingJobStatus.model_validate(row.job["status"])
    return plan, after.model_dump(mode="json", by_alias=True, exclude_none=True)


def check(row: Row) -> None:
    plan, after = run(row)
    want = row.want
    if want.phase is not None:
        assert after.get("phase") == want.phase
    if want.attempt is not None:
        assert after.get("attempt") == want.attempt
    if want.actions is not None:
        assert plan.actions == want.actions
    if want.events is not None:
        assert tuple(event.reason for event in plan.events) == want.events
    if want.writes is not None:
        assert (plan.status is not None) is want.writes
    if want.wake_in_s is not None:
        assert plan.wake_at == row.now + timedelta(seconds=want.wake_in_s)
    found = {item["type"]: item for item in after.get("conditions", ())}
    for kind, wanted in (want.conditions or {}).items():
        item = found.get(kind)
        assert (item and (item["status"], item["reason"])) == wanted, kind
    for kind, text in (want.messages or {}).items():
        message = (
            " | ".join(event.message for event in plan.events) if kind == "event" else found[kind]["message"]
        )
        assert text in message
    for path, value in (want.fields or {}).items():
        assert dig(after, path) == value, path


def dig(value: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(value, list):
            value = value[int(part)] if int(part) < len(value) else None
        else:
            value = (value or {}).get(part)
    return value


def settled(row_job: dict[str, Any], observed: Observed, now: datetime = NOW) -> dict[str, Any]:
    """Return the job after its status has taken in `observed`: for rows about passes that must change
    nothing.
    """
    plan = reconcile(row_job, observed, now)
    if plan.status is None:
        return row_job
    return {**row_job, "status": plan.status.model_dump(mode="json", by_alias=True, exclude_none=True)}


def rule(action: str, **on: Any) -> dict[str, Any]:
    return {"action": action, **on}


def ruled(
    *pods: PodView, id: str, rules: list[dict[str, Any]], want: Want, now: Any = NOW, **more: Any
) -> Row:
    """Row of a running first attempt of two workers under these failure rules."""
    spec = {"failurePolicy": {"rules": rules, **more.pop("policy", {})}, **more.pop("spec", {})}
    observed = seen(*pods, progress=more.pop("progress", None))
    return Row(id=id, job=job(spec=spec, status=status("Running", **more)), seen=observed, want=want, now=now)
