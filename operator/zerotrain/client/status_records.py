"""Parts of a job's status as records: conditions, failures, checkpoints, hangs and stragglers.

`job.Job` consists of them. A record never changes: ask the client again for a newer one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Self

from zerotrain.client.lenient_json import Fields

FINISHED_PHASES = frozenset({"Completed", "Failed"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """One condition, in the form of metav1.Condition."""

    type: str
    status: str
    """True, False or Unknown."""
    reason: str
    message: str
    last_transition_time: datetime | None

    @property
    def is_true(self) -> bool:
        return self.status == "True"

    @classmethod
    def of(cls, fields: Fields) -> Self:
        return cls(
            type=fields.text("type"),
            status=fields.text("status"),
            reason=fields.text("reason"),
            message=fields.text("message"),
            last_transition_time=fields.moment("lastTransitionTime"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """Number of workers or ranks that are requested, running and ready."""

    desired: int
    running: int
    ready: int

    @classmethod
    def of(cls, fields: Fields) -> Self:
        return cls(
            desired=fields.count("desired"), running=fields.count("running"), ready=fields.count("ready")
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Newest checkpoint that the operator knows of."""

    step: int
    path: str
    """Folder as the workers see it."""
    time: datetime | None
    attempt: int
    durable: bool

    @classmethod
    def of(cls, fields: Fields) -> Self | None:
        if not fields:
            return None
        return cls(
            step=fields.count("step"),
            path=fields.text("path"),
            time=fields.moment("time"),
            attempt=fields.count("attempt"),
            durable=fields.flag("durable"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """Result of the helper pod that read the newest checkpoint."""

    state: str
    step: int
    pod: str
    message: str

    @classmethod
    def of(cls, fields: Fields) -> Self | None:
        if not fields:
            return None
        return cls(
            state=fields.text("state"),
            step=fields.count("step"),
            pod=fields.text("pod"),
            message=fields.text("message"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """One of the workers that had failed when an attempt was ended."""

    rank: int | None
    pod: str
    node: str
    exit_code: int | None
    reason: str
    message: str

    @classmethod
    def of(cls, fields: Fields) -> Self:
        return cls(
            rank=fields.whole("rank"),
            pod=fields.text("pod"),
            node=fields.text("node"),
            exit_code=fields.whole("exitCode"),
            reason=fields.text("reason"),
            message=fields.text("message"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Reason for the end of an attempt."""

    attempt: int
    time: datetime | None
    rank: int | None
    pod: str
    container: str
    """Init container that failed; empty where a rank did."""
    node: str
    exit_code: int | None
    reason: str
    cause: str
    """Budget that the restart was charged to: app, infra or preemption; empty for none."""
    message: str
    last_line: str
    stacks: str
    """ConfigMap with the stacks of the ranks, after a hang."""
    step: int | None
    rule: int | None
    action: str
    log: str
    """Key in the ConfigMap `<job>-failures`; empty where no lines were kept."""
    ranks: tuple[RankFailure, ...]

    @classmethod
    def of(cls, fields: Fields) -> Self:
        return cls(
            attempt=fields.count("attempt"),
            time=fields.moment("time"),
            rank=fields.whole("rank"),
            pod=fields.text("pod"),
            container=fields.text("container"),
            node=fields.text("node"),
            exit_code=fields.whole("exitCode"),
            reason=fields.text("reason"),
            cause=fields.text("cause"),
            message=fields.text("message"),
            last_line=fields.text("lastLine"),
            stacks=fields.text("stacks"),
            step=fields.whole("step"),
            rule=fields.whole("rule"),
            action=fields.text("action"),
            log=fields.text("log"),
            ranks=tuple(RankFailure.of(item) for item in fields.parts("ranks")),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Restarts:
    """Number of restarts over the life of the job, by the budget that they were charged to."""

    app: int
    infra: int
    preemption: int
    uncharged: int
    total: int

    @classmethod
    def of(cls, fields: Fields) -> Self:
        return cls(
            app=fields.count("app"),
            infra=fields.count("infra"),
            preemption=fields.count("preemption"),
            uncharged=fields.count("uncharged"),
            total=fields.count("total"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Culprit:
    """Rank that holds up the others, by a hang or as a straggler."""

    attempt: int
    rank: int | None
    pod: str
    node: str
    message: str
    since: datetime | None = None
    step: int = 0
    phase: str = ""
    limit_s: int = 0
    stacks: str = ""
    percent: int = 0

    @classmethod
    def of(cls, fields: Fields) -> Self | None:
        if not fields:
            return None
        return cls(
            attempt=fields.count("attempt"),
            rank=fields.whole("rank"),
            pod=fields.text("pod"),
            node=fields.text("node"),
            message=fields.text("message"),
            since=fields.moment("since"),
            step=fields.count("step"),
            phase=fields.text("phase"),
            limit_s=fields.count("limitSeconds"),
            stacks=fields.text("stacks"),
            percent=fields.count("percent"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class YieldRequest:
    """Request to the ranks to checkpoint and stop, with its reason."""

    reason: str
    message: str
    requested_at: datetime | None

    @classmethod
    def of(cls, fields: Fields) -> Self | None:
        if not fields:
            return None
        return cls(
            reason=fields.text("reason"),
            message=fields.text("message"),
            requested_at=fields.moment("requestedAt"),
        )
