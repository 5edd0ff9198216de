"""Metrics of the operator about itself and, from the leading replica, about every job.

`operator.cluster.telemetry` and `operator.cluster.job_metrics` build them. A scrape must honour the labels:
the `namespace` of a job's series is the job's.
"""

from __future__ import annotations

from .spec import MetricSpec, Rows, Source

RECONCILE_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
VERBS = ("GET", "POST", "PUT", "PATCH", "DELETE")
JOB_PHASES = (
    "Queued",
    "Pending",
    "Starting",
    "Running",
    "Restarting",
    "Yielding",
    "Suspending",
    "Suspended",
    "Stalled",
    "Completed",
    "Failed",
)
HANG_PHASES = ("start", "step", "checkpoint")
"""Phases for which a hang policy has limits."""

RESTART_CAUSES = ("app", "infra", "preemption", "uncharged")
WATCHES = ("pods", "nodes", "zerotrainingjobs", "workloads")
PLANNED_TIERS = ("gpu", "host", "pinned", "nvme")

_own = Rows(source=Source.OPERATOR)
_job = Rows(source=Source.JOB)

OPERATOR_METRICS: tuple[MetricSpec, ...] = (
    _own.seconds(
        "zerotrain_operator_reconcile_duration_seconds",
        "Duration of one pass over a job, its API requests included.",
        RECONCILE_BUCKETS_S,
    ),
    _own.counter(
        "zerotrain_operator_reconcile_errors_total", "Passes that ended in an error and are repeated."
    ),
    _own.gauge("zerotrain_operator_queue_depth", "Jobs that wait for a pass."),
    _own.gauge(
        "zerotrain_operator_queue_oldest_age_seconds",
        "How long the job that waits longest for a pass has waited; 0 while none does.",
    ),
    _own.counter(
        "zerotrain_operator_api_requests_total",
        "Requests to the API server by verb, resource and status code (0: no answer). The usual codes are "
        "there at 0 from the first request of a verb and resource on.",
        verb=(),
        resource=(),
        code=(),
    ),
    _own.seconds(
        "zerotrain_operator_api_request_duration_seconds",
        "Duration of one request to the API server, without watches.",
        RECONCILE_BUCKETS_S,
        verb=VERBS,
    ),
    _own.gauge("zerotrain_operator_jobs", "Jobs by phase.", phase=JOB_PHASES),
    _own.gauge(
        "zerotrain_operator_jobs_without_series",
        "Jobs beyond the bounds of a scrape, by namespace and phase: they have no series of their own, the "
        "oldest that ended or are idle first. `job_namespace` is empty for further namespaces together.",
        job_namespace=(),
        phase=(*JOB_PHASES, "other"),
    ),
    _own.gauge("zerotrain_operator_leader", "1 while this replica holds the lease."),
    _own.gauge("zerotrain_operator_loop_lag_seconds", "How late the event loop woke up at the last check."),
    _own.gauge(
        "zerotrain_operator_watch_age_seconds",
        "Time since a watch last brought an event or a bookmark. 0 while there is no watch (of Kueue's "
        "workloads: until a job is in a queue).",
        resource=WATCHES,
    ),
    _own.gauge(
        "zerotrain_operator_unreadable",
        "1 while the API server refuses to list or watch these objects there, 0 otherwise: where pods are "
        "refused, no job is reconciled; where jobs are, their changes are not seen; where nodes are, lost "
        "ones are not. `watched_namespace` is "
        "empty for the whole cluster.",
        resource=("pods", "zerotrainingjobs", "nodes"),
        watched_namespace=(),
    ),
    _own.gauge(
        "zerotrain_operator_unresponsive_jobs",
        "Jobs whose worker 0 runs and has not answered the operator for two minutes: a hang of theirs is not "
        "found.",
    ),
    _own.gauge(
        "zerotrain_operator_unwritten_jobs",
        "Jobs whose status the API server refuses to store: what is shown of them is old. /readyz has the "
        "API server's words.",
    ),
    _own.info("zerotrain_operator_info", "The operator's version.", "version"),
)

JOB_METRICS: tuple[MetricSpec, ...] = (
    _job.info("zerotrain_job_info", "What the job runs as.", "zero_stage", "queue"),
    _job.gauge("zerotrain_job_phase", "1, for the current phase of the job alone.", phase=()),
    _job.gauge("zerotrain_job_phase_since_timestamp_seconds", "Unix time at which the phase began."),
    _job.gauge("zerotrain_job_created_timestamp_seconds", "Unix time of the job's creation."),
    _job.gauge(
        "zerotrain_job_start_timestamp_seconds",
        "Unix time at which the job became active, anew on resume; absent before.",
    ),
    _job.gauge(
        "zerotrain_job_completion_timestamp_seconds",
        "Unix time at which the job completed or failed; absent before.",
    ),
    _job.gauge("zerotrain_job_attempt", "Number of the current attempt; 0 before the first."),
    _job.gauge(
        "zerotrain_job_attempt_start_timestamp_seconds",
        "Unix time at which the current attempt was decided; absent before the first.",
    ),
    _job.gauge("zerotrain_job_workers", "Worker pods that the job asks for."),
    _job.gauge("zerotrain_job_workers_ready", "Worker pods whose ranks are past the rendezvous."),
    _job.gauge("zerotrain_job_ranks", "Ranks that the job asks for."),
    _job.gauge("zerotrain_job_ranks_ready", "Ranks past the rendezvous."),
    _job.counter(
        "zerotrain_job_restarts_total",
        "Restarts by the budget they were charged to, or uncharged, where a rule says so.",
        cause=RESTART_CAUSES,
    ),
    _job.gauge("zerotrain_job_step", "Optimizer steps done, as the operator last heard."),
    _job.gauge("zerotrain_job_total_steps", "Optimizer steps that the job asks for; 0 while unknown."),
    _job.gauge(
        "zerotrain_job_last_step_timestamp_seconds",
        "Unix time at which the step last moved; absent before the first.",
    ),
    _job.gauge("zerotrain_job_last_checkpoint_step", "Step of the newest checkpoint; absent without one."),
    _job.gauge(
        "zerotrain_job_last_checkpoint_timestamp_seconds",
        "Unix time of the newest checkpoint; absent without one.",
    ),
    _job.gauge(
        "zerotrain_job_checkpoint_verification_failed",
        "1 after the verification of the last checkpoint found it damaged.",
    ),
    _job.gauge("zerotrain_job_hung", "1 while the job's step does not move and it counts as hung."),
    _job.gauge(
        "zerotrain_job_hang_limit_seconds",
        "Time that the job's hang policy lets a rank stand still: in a part of its start or the first step, "
        "between steps (at least: slow ones have more; with a stepTimeoutFactor above 10, that often the last"
        " step), in a checkpoint.",
        phase=HANG_PHASES,
    ),
    _job.gauge(
        "zerotrain_job_straggler_ratio",
        "Own work of the slow rank in a step, divided by the middle rank's; absent while none stands out.",
        rank=(),
    ),
    _job.gauge(
        "zerotrain_job_failure_timestamp_seconds",
        "Unix time of the newest failure of its kind that ended an attempt: the reason, the exit code and, "
        "where it is one of ours, the exception. Absent before.",
        reason=(),
        exit_code=(),
        exception=(),
    ),
    _job.gauge(
        "zerotrain_job_planned_memory_bytes",
        "What the planner predicts of one rank, activations included; absent where it does not know.",
        tier=PLANNED_TIERS,
    ),
)
