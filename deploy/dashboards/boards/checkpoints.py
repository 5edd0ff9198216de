"""Checkpoints and goodput of one job: the expected cost of a crash, and the cost of past crashes."""

from __future__ import annotations

from deploy.dashboards.boards.common import GOODPUT_OBJECTIVE, at_least, goodput, phase_timeline
from deploy.dashboards.model import (
    Column,
    Dashboard,
    Level,
    Panel,
    PanelKind,
    Query,
    Row,
    Scope,
    Threshold,
    Unit,
)
from deploy.dashboards.selectors import WINDOW, mean, quantile, rate

_DURATION = "zerotrain_checkpoint_duration_seconds"

_GOODPUT = Row(
    title="Goodput",
    panels=(
        Panel(
            title="Goodput of the last 24 hours",
            description="""Share of the wall time that moved the model to a step never reached before. The
            objective is 95 %; the next panels show the losses.""",
            kind=PanelKind.STAT,
            unit=Unit.RATIO,
            width=4,
            base=Level.WARNING,
            thresholds=at_least(GOODPUT_OBJECTIVE, Level.GOOD),
            queries=(Query(expr=goodput("JOB", "24h"), legend="24 h"),),
            alerts=("GoodputBudgetBurn",),
        ),
        Panel(
            title="Goodput over time",
            description="""The same over one and over six hours: a dip is an incident, a level below the
            objective is a habit.""",
            unit=Unit.RATIO,
            width=10,
            base=Level.WARNING,
            minimum=0,
            maximum=1,
            thresholds=at_least(GOODPUT_OBJECTIVE, Level.GOOD),
            queries=(
                Query(expr=goodput("JOB", "1h"), legend="1 h"),
                Query(expr=goodput("JOB", "6h"), legend="6 h"),
            ),
            alerts=("GoodputBudgetBurn",),
        ),
        Panel(
            title="Lost share of the time",
            description="""What is missing to 100 %. The objective allows 5 %: losing half of an hour is ten
            times too fast and pages, losing a fifth of six hours is four times too fast and opens
            a ticket.""",
            unit=Unit.RATIO,
            width=10,
            minimum=0,
            maximum=1,
            thresholds=(
                Threshold(value=0.2, level=Level.WARNING, alert="GoodputBudgetBurn"),
                Threshold(value=0.5, level=Level.CRITICAL, alert="GoodputBudgetBurn"),
            ),
            queries=(
                Query(expr=f"1 - {goodput('JOB', '1h')}", legend="1 h"),
                Query(expr=f"1 - {goodput('JOB', '6h')}", legend="6 h"),
            ),
            alerts=("GoodputBudgetBurn",),
        ),
        Panel(
            title="Where the time was lost",
            description="""Share of the wall time of rank 0 that did not move the model, by reason: starting
            up, doing steps again after a restart, steps skipped for overflow, standing still for
            checkpoints. Time without pods is not in it.""",
            unit=Unit.RATIO,
            stacked=True,
            width=12,
            minimum=0,
            queries=(
                Query(
                    expr=f"""sum by (reason)
                    (rate(zerotrain_lost_seconds_total{{JOB, rank="0"}}[{WINDOW}]))""",
                    legend="{{reason}}",
                ),
            ),
            alerts=("GoodputBudgetBurn",),
        ),
        Panel(
            title="Restarts by cause",
            description="""app: the program failed; infra: node, network or drive; preemption: a job of higher
            priority; uncharged: restarts that no budget counts, such as suspend or resize.""",
            unit=Unit.COUNT,
            width=12,
            minimum=0,
            queries=(
                Query(
                    expr="sum by (cause) (zerotrain_job_restarts_total{JOB})",
                    legend="{{cause}}",
                ),
            ),
            alerts=("RestartLoop",),
        ),
        phase_timeline(width=12, height=7),
        Panel(
            title="Failures that ended attempts",
            description="""The newest failures of each kind with the time at which they ended an attempt.
            `zerotrain explain exit-code N` shows how the operator treats a code.""",
            kind=PanelKind.TABLE,
            unit=Unit.AGO,
            width=12,
            height=7,
            queries=(
                Query(
                    expr="""1000 * max by (reason, exit_code, exception)
                    (zerotrain_job_failure_timestamp_seconds{JOB})"""
                ),
            ),
            columns=(
                Column(label="Value", title="When", unit=Unit.AGO),
                Column(label="reason", title="Reason"),
                Column(label="exit_code", title="Exit code"),
                Column(label="exception", title="Exception"),
            ),
            no_value="No attempt failed",
            alerts=("RestartLoop", "JobFailed"),
        ),
    ),
)

_CHECKPOINTS = Row(
    title="Checkpoints",
    panels=(
        Panel(
            title="Age of the newest checkpoint",
            description="""What a crash would cost now, and how often the job's policy wants a checkpoint.
            Healthy is a saw-tooth below the interval.""",
            unit=Unit.SECONDS,
            minimum=0,
            queries=(
                Query(
                    expr="time() - max(zerotrain_last_checkpoint_timestamp_seconds{JOB})",
                    legend="age",
                ),
                Query(
                    expr="max(zerotrain_checkpoint_interval_seconds{JOB})", legend="interval of the policy"
                ),
            ),
            alerts=("CheckpointStale",),
        ),
        Panel(
            title="Steps at risk",
            description="""Steps since the newest durable checkpoint: they would be done again after a
            crash.""",
            unit=Unit.COUNT,
            minimum=0,
            queries=(
                Query(
                    expr="max(zerotrain_step{JOB}) - max(zerotrain_last_checkpoint_step{JOB})", legend="steps"
                ),
            ),
            alerts=("CheckpointStale",),
        ),
        Panel(
            title="Duration",
            description="""From the start of a checkpoint to its durable commit, and of loading one. Training
            goes on meanwhile, except for the part in the next panel.""",
            unit=Unit.SECONDS,
            minimum=0,
            queries=(
                Query(expr=mean(_DURATION, 'JOB, operation="save"'), legend="save, mean"),
                Query(
                    expr=quantile(0.99, _DURATION, 'JOB, operation="save"'),
                    legend="save, p99",
                    exemplars=True,
                ),
                Query(
                    expr="""max by (namespace, job_name)
                    (zerotrain_checkpoint_duration_seconds_sum{JOB, operation="load"})""",
                    legend="load, this attempt",
                ),
            ),
        ),
        Panel(
            title="Standing still for a checkpoint",
            description="""Time per save in which training stood still: the copy into the save's buffers, and
            the wait for an earlier save.""",
            unit=Unit.SECONDS,
            minimum=0,
            queries=(
                Query(
                    expr=mean("zerotrain_phase_duration_seconds", 'JOB, phase="checkpoint"'), legend="mean"
                ),
            ),
        ),
        Panel(
            title="Size of the newest checkpoint",
            description="""Of all ranks together, and the largest rank's part. Parts that differ much make one
            rank's save the slowest.""",
            unit=Unit.BYTES,
            minimum=0,
            queries=(
                Query(expr="sum(zerotrain_checkpoint_size_bytes{JOB})", legend="all ranks"),
                Query(expr="max(zerotrain_checkpoint_size_bytes{JOB})", legend="largest part"),
            ),
        ),
        Panel(
            title="Written into checkpoints",
            description="""Bytes per second into the checkpoint volume, all ranks together. A high floor means
            that saves overlap: the interval is too short for the storage.""",
            unit=Unit.BYTES_PER_SECOND,
            minimum=0,
            queries=(Query(expr=rate("zerotrain_checkpoint_bytes_total"), legend="written"),),
        ),
        Panel(
            title="Saves that failed",
            description="""Checkpoints that could not be made durable: no space, no permission, or fenced off
            by a newer attempt. Healthy is 0.""",
            kind=PanelKind.STAT,
            unit=Unit.COUNT,
            height=5,
            thresholds=at_least(1, Level.CRITICAL),
            queries=(Query(expr="sum(zerotrain_checkpoint_failures_total{JOB})", legend="failed saves"),),
            alerts=("CheckpointFailed",),
        ),
        Panel(
            title="Damaged checkpoints skipped",
            description="""Checkpoints that this attempt found damaged when it resumed, and went back to an
            older one. Healthy is 0.""",
            kind=PanelKind.STAT,
            unit=Unit.COUNT,
            height=5,
            thresholds=at_least(1, Level.CRITICAL),
            queries=(Query(expr="max(zerotrain_checkpoint_rejected{JOB})", legend="passed over"),),
            alerts=("CheckpointVerifyFailed",),
        ),
        Panel(
            title="Verification",
            description="""Result of the operator's verification pod for the newest checkpoint: damaged or
            not. It runs where the job asks for it.""",
            kind=PanelKind.STAT,
            height=5,
            thresholds=at_least(1, Level.CRITICAL),
            queries=(Query(expr="max(zerotrain_job_checkpoint_verification_failed{JOB})", legend="damaged"),),
            alerts=("CheckpointVerifyFailed",),
        ),
    ),
)

CHECKPOINTS = Dashboard(
    name="checkpoints",
    title="zerotrain / Checkpoints and goodput",
    description="""What share of the paid time moved the model, where the rest went, and what a crash would
    cost now.""",
    scope=Scope.JOB,
    rows=(_GOODPUT, _CHECKPOINTS),
)
