"""Cases about the progress of a job: hangs, missing ranks and metrics, restarts, waiting, failure; and the
operator.
"""

from __future__ import annotations

from tests.monitoring.rules.model import (
    NAMESPACE,
    Case,
    Firing,
    Training,
    Value,
    flat,
    merged,
    ramp,
    series,
)

GPT = {"namespace": NAMESPACE, "job_name": "gpt"}


def job(metric: str, values: list[Value], **labels: str) -> dict[str, list[Value]]:
    """Return a series of the operator about the job."""
    return {series(metric, **{"job_name": "gpt", **labels}): values}


def phase(name: str, count: int, *, since_s: float = 0.0) -> dict[str, list[Value]]:
    """Return the series of a job that is in this phase all the time."""
    return merged(  # type: ignore[return-value]
        job("zerotrain_job_phase", flat(1, count), phase=name),
        job("zerotrain_job_phase_since_timestamp_seconds", flat(since_s, count)),
    )


def allowed(count: int, **limits_s: float) -> dict[str, list[Value]]:
    """Return the hang limits that the operator exports for the job, by phase."""
    name = "zerotrain_job_hang_limit_seconds"
    return merged(*(job(name, flat(limit_s, count), phase=phase) for phase, limit_s in limits_s.items()))  # type: ignore[return-value]


def stalled() -> tuple[Case, ...]:
    alert = "ZeroTrainJobStalled"
    hang = Training().train(40, 1.0).hang(60)
    healthy = Training(job="other").train(100, 1.0)
    slow = Training().train(40, 60.0).hang(60)
    saving = Training().train(40, 60.0).hang(60)
    saves = merged(
        saving.of_ranks("zerotrain_checkpoint_duration_seconds_sum", ramp(0, 10, 101), operation="save"),
        saving.of_ranks("zerotrain_checkpoint_duration_seconds_count", ramp(0, 0.1, 101), operation="save"),
    )
    name = "zerotrain_checkpoint_duration_seconds"
    first = merged(
        hang.of_rank(0, f"{name}_sum", [*flat(0, 30), *flat(200, 71)], operation="save"),
        hang.of_rank(0, f"{name}_count", [*flat(0, 30), *flat(1, 71)], operation="save"),
    )
    starting = Training(begin=10).hang(100)
    checkpointing = Training().train(20, 1.0).hang(90)
    return (
        Case(
            alert=alert,
            name="a hang after twenty minutes of steps of one second, beside a healthy job",
            series=merged(hang.series(), healthy.series()),
            fires=(Firing(labels=GPT, severity="critical", from_s=1590),),
        ),
        Case(
            alert=alert,
            name="steps of a minute have ten minutes",
            series=slow.series(),
            fires=(Firing(labels=GPT, severity="critical", from_s=1890),),
        ),
        Case(
            alert=alert,
            name="checkpoints of a hundred seconds add five minutes",
            series={**saving.series(), **saves},
            fires=(Firing(labels=GPT, severity="critical", from_s=2190),),
        ),
        Case(
            alert=alert,
            name="so does the first checkpoint, of two hundred",
            series={**hang.series(), **first},
            fires=(Firing(labels=GPT, severity="critical", from_s=1890),),
        ),
        Case(
            alert=alert,
            name="half an hour for the first step",
            series=starting.series(),
            fires=(Firing(labels=GPT, severity="critical", from_s=2190),),
        ),
        Case(
            alert=alert,
            name="half an hour for a checkpoint under way",
            series=merged(
                checkpointing.series(),
                checkpointing.of_rank(0, "zerotrain_rank_phase", flat(1, 111), phase="checkpoint"),
                checkpointing.of_rank(0, "zerotrain_rank_phase", flat(0, 111), phase="step"),
            ),
            fires=(Firing(labels=GPT, severity="critical", from_s=2460),),
        ),
        Case(
            alert=alert,
            name="a job whose policy gives its start two hours",
            interval_s=60,
            series=merged(Training(begin=10, interval_s=60).hang(140).series(), allowed(150, start=7200)),
            fires=(Firing(labels=GPT, severity="critical", from_s=7920),),
        ),
        Case(
            alert=alert,
            name="a job whose policy gives every step an hour",
            interval_s=60,
            series=merged(
                Training(interval_s=60).train(20, 1.0).hang(80).series(), allowed(101, step=3600, start=1800)
            ),
            fires=(Firing(labels=GPT, severity="critical", from_s=4920),),
        ),
        Case(
            alert=alert,
            name="a job whose policy gives a checkpoint an hour",
            interval_s=60,
            series=merged(
                Training(interval_s=60).train(20, 1.0).hang(80).series(),
                Training().of_rank(0, "zerotrain_rank_phase", flat(1, 101), phase="checkpoint"),
                allowed(101, step=300, checkpoint=3600),
            ),
            fires=(Firing(labels=GPT, severity="critical", from_s=4860),),
        ),
        Case(
            alert=alert,
            name="the operator says so, of a program whose metrics nobody scrapes",
            series=merged(
                job("zerotrain_job_hung", [*flat(0, 10), *flat(1, 10), *flat(0, 10)]),
                job("zerotrain_job_last_step_timestamp_seconds", flat(0, 30)),
            ),
            fires=(Firing(labels=GPT, severity="critical", from_s=360, until_s=600),),
        ),
        Case(
            alert=alert,
            name="a restart ends it",
            series=merged(
                Training().train(20, 1.0).hang(20).series(),
                Training(attempt=2, begin=41).train(20, 1.0).series(),
            ),
            fires=(Firing(labels=GPT, severity="critical", from_s=990, until_s=1230),),
        ),
    )


def seen() -> tuple[Case, ...]:
    ranks = Training(ranks=4)
    up = {series("zerotrain_rank_up", **ranks.labels(rank)): flat(1, 60) for rank in range(3)}
    sometimes: list[Value] = [*flat(1, 10), *flat(None, 30), *flat(1, 20)]
    return (
        Case(
            alert="ZeroTrainMetricsAbsent",
            name="running, and scraped only at the beginning and at the end",
            series=merged(
                phase("Running", 60),
                ranks.of_rank(0, "zerotrain_rank_up", [*flat(1, 10), *flat(None, 40), 1, 1]),
            ),
            fires=(Firing(labels=GPT, from_s=1170, until_s=1500),),
        ),
        Case(
            alert="ZeroTrainMetricsAbsent",
            name="a queued job has no workers to scrape",
            series=merged(phase("Queued", 60), job("zerotrain_job_phase", flat(0, 60), phase="Running")),
            quiet_at_s=(600, 900, 1200),
        ),
        Case(
            alert="ZeroTrainRankMissing",
            name="one of four is not scraped for a while",
            series=merged(
                up,
                ranks.of_ranks("zerotrain_world_size", flat(4, 60)),
                ranks.of_rank(3, "zerotrain_rank_up", sometimes),
                phase("Running", 60),
            ),
            fires=(Firing(labels=GPT, from_s=870, until_s=1200),),
        ),
        Case(
            alert="ZeroTrainRankMissing",
            name="a process that does not run, and no operator that is scraped",
            series=merged(
                up,
                ranks.of_ranks("zerotrain_world_size", flat(4, 60)),
                ranks.of_rank(3, "zerotrain_rank_up", [*flat(1, 10), *flat(0, 50)]),
            ),
            fires=(Firing(labels=GPT, from_s=600),),
        ),
        Case(
            alert="ZeroTrainRankMissing",
            name="workers of a starting attempt come one after the other",
            series=merged(
                up,
                ranks.of_ranks("zerotrain_world_size", flat(4, 60)),
                phase("Starting", 60),
                job("zerotrain_job_phase", flat(0, 60), phase="Running"),
            ),
            quiet_at_s=(600, 900, 1500),
        ),
    )


def lifecycle() -> tuple[Case, ...]:
    return (
        Case(
            alert="ZeroTrainRestartLoop",
            name="three restarts within an hour, of different causes",
            series=merged(
                job("zerotrain_job_restarts_total", [*flat(0, 40), *flat(1, 20), *flat(2, 140)], cause="app"),
                job("zerotrain_job_restarts_total", [*flat(0, 80), *flat(1, 120)], cause="infra"),
            ),
            fires=(Firing(labels=GPT, severity="critical", from_s=2400, until_s=4770),),
        ),
        *(
            Case(
                alert="ZeroTrainRestartLoop",
                name=f"what is no failure: {cause}",
                series=job("zerotrain_job_restarts_total", [*flat(0, 40), *ramp(1, 1, 80)], cause=cause),
                quiet_at_s=(1200, 1800, 2400, 3500),
            )
            for cause in ("preemption", "uncharged")
        ),
        Case(
            alert="ZeroTrainRestartLoop",
            name="two within an hour",
            series=job("zerotrain_job_restarts_total", [*flat(0, 40), *flat(2, 160)], cause="app"),
            quiet_at_s=(1200, 2400, 3600, 5900),
        ),
        Case(
            alert="ZeroTrainRestartLoop",
            name="three in three hours, seen by an operator that was replaced",
            series=merged(
                job("zerotrain_job_restarts_total", [*flat(7, 100), *flat(8, 100)], cause="app", pod="old"),
                job(
                    "zerotrain_job_restarts_total", [*flat(None, 200), *flat(9, 200)], cause="app", pod="new"
                ),
            ),
            quiet_at_s=(3000, 3600, 6000, 6600, 9000),
        ),
        Case(
            alert="ZeroTrainJobPending",
            name="a quarter of an hour without nodes",
            series=phase("Pending", 50, since_s=60),
            fires=(Firing(labels=GPT, from_s=990),),
        ),
        Case(
            alert="ZeroTrainJobPending",
            name="running is not pending, and a queue may take its time",
            series=merged(phase("Queued", 90), job("zerotrain_job_phase", flat(0, 90), phase="Pending")),
            quiet_at_s=(900, 1200, 2600),
        ),
        *(
            Case(
                alert="ZeroTrainJobFailed",
                name=f"{name} since five minutes, for a day",
                interval_s=300,
                series=merged(
                    job("zerotrain_job_phase", [0, *flat(1, 300)], phase=name),
                    job("zerotrain_job_phase", [1, *flat(0, 300)], phase="Running"),
                    job("zerotrain_job_phase_since_timestamp_seconds", [0, *flat(300, 300)]),
                ),
                fires=(Firing(labels=GPT, severity="critical", from_s=300, until_s=86700),),
            )
            for name in ("Failed", "Stalled")
        ),
    )


def operator() -> tuple[Case, ...]:
    def replica(metric: str, values: list[Value], pod: str = "op-0") -> dict[str, list[Value]]:
        return {series(metric, namespace="zerotrain", pod=pod): values}

    here = {"namespace": "zerotrain"}
    errors: list[Value] = [*flat(0, 40), *ramp(1, 1, 60), *flat(60, 60)]
    return (
        Case(
            alert="ZeroTrainOperatorDown",
            name="gone for a while",
            series=replica("zerotrain_operator_leader", [*flat(1, 20), *flat(None, 30), *flat(0, 20)]),
            fires=(Firing(labels={}, severity="critical", from_s=1170, until_s=1500),),
        ),
        Case(
            alert="ZeroTrainOperatorNoLeader",
            name="a lease that changes hands, and one that nobody takes",
            series=merged(
                replica("zerotrain_operator_leader", [*flat(1, 10), *flat(0, 3), *flat(0, 10), *flat(0, 20)]),
                replica(
                    "zerotrain_operator_leader",
                    [*flat(0, 10), *flat(0, 3), *flat(1, 10), *flat(0, 10), *flat(1, 10)],
                    pod="op-1",
                ),
            ),
            fires=(Firing(labels=here, severity="critical", from_s=810, until_s=990),),
        ),
        Case(
            alert="ZeroTrainOperatorsOverlap",
            name="a second operator speaks of one of two jobs, until it is limited to its namespaces",
            series=merged(
                job("zerotrain_job_created_timestamp_seconds", flat(5, 90), pod="op-0"),
                job("zerotrain_job_created_timestamp_seconds", flat(5, 90), job_name="other", pod="op-0"),
                job("zerotrain_job_created_timestamp_seconds", [*flat(None, 10), *flat(5, 40)], pod="else"),
            ),
            fires=(Firing(labels={}, from_s=900, until_s=1770),),
        ),
        Case(
            alert="ZeroTrainOperatorsOverlap",
            name="a leader that is replaced, and is still remembered for some minutes",
            series=merged(
                job("zerotrain_job_created_timestamp_seconds", flat(5, 30), pod="op-0"),
                job("zerotrain_job_created_timestamp_seconds", [*flat(None, 20), *flat(5, 60)], pod="op-1"),
            ),
            quiet_at_s=(600, 900, 1200, 1800),
        ),
        Case(
            alert="ZeroTrainWorkersUnreachable",
            name="one replica hears nothing of a job for a while, and the other knows of none",
            series=merged(
                replica("zerotrain_operator_unresponsive_jobs", [*flat(0, 10), *flat(1, 20), *flat(0, 20)]),
                replica("zerotrain_operator_unresponsive_jobs", flat(0, 50), pod="op-1"),
            ),
            fires=(Firing(labels=here, from_s=480, until_s=900),),
        ),
        Case(
            alert="ZeroTrainWorkersUnreachable",
            name="one that is slow to answer now and then",
            series=replica("zerotrain_operator_unresponsive_jobs", [0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0] * 4),
            quiet_at_s=(300, 600, 900, 1200),
        ),
        Case(
            alert="ZeroTrainOperatorStatusRefused",
            name="a role that is taken away for ten minutes, and the other replica writes nothing",
            series=merged(
                replica("zerotrain_operator_unwritten_jobs", [*flat(0, 10), *flat(1, 20), *flat(0, 20)]),
                replica("zerotrain_operator_unwritten_jobs", flat(0, 50), pod="op-1"),
            ),
            fires=(Firing(labels=here, from_s=600, until_s=900),),
        ),
        Case(
            alert="ZeroTrainOperatorStatusRefused",
            name="an upgrade that applies its CustomResourceDefinition after the operator",
            series=replica("zerotrain_operator_unwritten_jobs", [*flat(0, 5), *flat(3, 9), *flat(0, 10)]),
            quiet_at_s=(300, 390, 420, 600),
        ),
        Case(
            alert="ZeroTrainOperatorReconcileErrors",
            name="every fifth pass fails for half an hour",
            series=merged(
                replica("zerotrain_operator_reconcile_errors_total", errors),
                replica("zerotrain_operator_reconcile_duration_seconds_count", ramp(0, 5, 160)),
            ),
            fires=(Firing(labels=here, from_s=2100, until_s=3270),),
        ),
        Case(
            alert="ZeroTrainOperatorReconcileErrors",
            name="every twentieth pass fails",
            series=merged(
                replica("zerotrain_operator_reconcile_errors_total", ramp(0, 1, 100)),
                replica("zerotrain_operator_reconcile_duration_seconds_count", ramp(0, 20, 100)),
            ),
            quiet_at_s=(900, 1800, 2900),
        ),
        Case(
            alert="ZeroTrainOperatorReconcileErrors",
            name="an operator with nothing to do",
            series=merged(
                replica("zerotrain_operator_reconcile_errors_total", flat(3, 100)),
                replica("zerotrain_operator_reconcile_duration_seconds_count", flat(9, 100)),
            ),
            quiet_at_s=(900, 1800, 2900),
        ),
    )


CASES = (*stalled(), *seen(), *lifecycle(), *operator())
