"""The operator itself: leadership, backlog, and the API server's answers."""

from __future__ import annotations

from deploy.dashboards.boards.common import PHASE_LEVELS, at_least
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
from deploy.dashboards.selectors import WINDOW

_RECONCILE = "zerotrain_operator_reconcile_duration_seconds"
_REQUESTS = "zerotrain_operator_api_requests_total"


def _quantile(share: float, histogram: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket{{OPERATOR}}[{WINDOW}])))"


_HEALTH = Row(
    title="Health",
    panels=(
        Panel(
            title="Leaders",
            description="""Replicas that hold the lease. Exactly 1 is healthy: 0 and nothing is reconciled,
            while running jobs go on without restarts.""",
            kind=PanelKind.STAT,
            unit=Unit.COUNT,
            width=4,
            height=4,
            base=Level.CRITICAL,
            thresholds=(
                Threshold(value=1, level=Level.GOOD),
                Threshold(value=2, level=Level.CRITICAL),
            ),
            queries=(Query(expr="sum(zerotrain_operator_leader{OPERATOR})", legend="leaders"),),
            alerts=("OperatorNoLeader", "OperatorDown"),
        ),
        Panel(
            title="Replicas",
            description="""Operators that answer the scrape. One is enough; a second takes over in seconds
            when the first one goes.""",
            kind=PanelKind.STAT,
            unit=Unit.COUNT,
            width=4,
            height=4,
            base=Level.CRITICAL,
            thresholds=at_least(1, Level.GOOD),
            queries=(Query(expr="count(zerotrain_operator_leader{OPERATOR})", legend="replicas"),),
            alerts=("OperatorDown",),
        ),
        Panel(
            title="Oldest waiting job",
            description="""How long the job at the head of the queue has waited for a pass. Healthy is below a
            second; more means that passes are slow or fail.""",
            kind=PanelKind.STAT,
            unit=Unit.SECONDS,
            width=4,
            height=4,
            thresholds=at_least(30, Level.WARNING),
            queries=(Query(expr="max(zerotrain_operator_queue_oldest_age_seconds{OPERATOR})", legend="age"),),
            alerts=("OperatorReconcileErrors",),
        ),
        Panel(
            title="Age of the watches",
            description="""Since the watch last brought an event or a bookmark; bookmarks come each minute.
            Above five minutes without news of pods the operator is blind and restarts itself. The watch of
            jobs is compared with a list every five minutes: twice that, and it brings nothing any more.""",
            kind=PanelKind.STAT,
            unit=Unit.SECONDS,
            width=4,
            height=4,
            thresholds=at_least(660, Level.CRITICAL),
            queries=(
                Query(
                    expr="max by (resource) (zerotrain_operator_watch_age_seconds{OPERATOR})",
                    legend="{{resource}}",
                ),
            ),
            alerts=("OperatorDown",),
        ),
        Panel(
            title="Passes that failed",
            description="""Share of the passes over jobs that ended in an error and are repeated. A conflict
            now and then is normal.""",
            kind=PanelKind.STAT,
            unit=Unit.RATIO,
            width=4,
            height=4,
            thresholds=at_least(0.1, Level.WARNING, "OperatorReconcileErrors"),
            queries=(
                Query(
                    expr=f"""sum(rate(zerotrain_operator_reconcile_errors_total{{OPERATOR}}[{WINDOW}]))
                    / sum(rate({_RECONCILE}_count{{OPERATOR}}[{WINDOW}]))""",
                    legend="failed",
                ),
            ),
            alerts=("OperatorReconcileErrors",),
        ),
        Panel(
            title="Jobs without an answer",
            description="""Jobs whose worker 0 runs and has not answered the operator for two minutes. Healthy
            is 0: the operator detects no hang of these jobs and requests no checkpoint.""",
            kind=PanelKind.STAT,
            unit=Unit.COUNT,
            width=4,
            height=4,
            thresholds=at_least(1, Level.WARNING),
            queries=(Query(expr="max(zerotrain_operator_unresponsive_jobs{OPERATOR})", legend="jobs"),),
            alerts=("WorkersUnreachable",),
        ),
        Panel(
            title="Statuses refused",
            description="""Jobs whose status the API server refuses to store. Healthy is 0: what is shown of
            them is old, and they are neither started nor restarted.""",
            kind=PanelKind.STAT,
            unit=Unit.COUNT,
            width=4,
            height=4,
            thresholds=at_least(1, Level.WARNING),
            queries=(Query(expr="max(zerotrain_operator_unwritten_jobs{OPERATOR})", legend="jobs"),),
            alerts=("OperatorStatusRefused",),
        ),
        Panel(
            title="Jobs of two operators",
            description="""Jobs that more than one operator looks after. Healthy is 0: two operators overwrite
            each other's statuses. After a change of leaders both are counted until the next scrapes.""",
            kind=PanelKind.STAT,
            unit=Unit.COUNT,
            width=4,
            height=4,
            thresholds=at_least(1, Level.WARNING),
            queries=(
                Query(
                    expr="""count(count by (namespace, job_name) (zerotrain_job_phase{OPERATOR} == 1) > 1)
                    or vector(0)""",
                    legend="jobs",
                ),
            ),
            alerts=("OperatorsOverlap",),
        ),
        Panel(
            title="Version",
            description="""Versions of the replicas that run. Two at once only while an upgrade rolls.""",
            kind=PanelKind.STAT,
            width=4,
            height=4,
            base=Level.NEUTRAL,
            shows_name=True,
            queries=(
                Query(expr="count by (version) (zerotrain_operator_info{OPERATOR})", legend="{{version}}"),
            ),
        ),
    ),
)

_WORK = Row(
    title="Work",
    panels=(
        Panel(
            title="Jobs by phase",
            description="""All jobs that the operator looks after. Many Pending is a full cluster or a queue,
            many Restarting is a sick one.""",
            unit=Unit.COUNT,
            stacked=True,
            minimum=0,
            series_levels=PHASE_LEVELS,
            queries=(Query(expr="sum by (phase) (zerotrain_operator_jobs{OPERATOR})", legend="{{phase}}"),),
            alerts=("JobPending", "JobFailed"),
        ),
        Panel(
            title="Duration of a pass",
            description="""One pass over one job, its API requests included. Healthy is tens of milliseconds;
            the API server's latency shows here first.""",
            unit=Unit.SECONDS,
            minimum=0,
            queries=tuple(
                Query(expr=_quantile(share, _RECONCILE), legend=legend)
                for share, legend in ((0.5, "p50"), (0.99, "p99"))
            ),
            alerts=("OperatorReconcileErrors",),
        ),
        Panel(
            title="Passes",
            description="""How many passes took how long. The band at the bottom is passes that had nothing to
            do.""",
            kind=PanelKind.HEATMAP,
            unit=Unit.SECONDS,
            queries=(
                Query(
                    expr=f"sum by (le) (rate({_RECONCILE}_bucket{{OPERATOR}}[{WINDOW}]))",
                    legend="{{le}}",
                    buckets=True,
                ),
            ),
        ),
        Panel(
            title="Queue",
            description="""Jobs that wait for a pass. It rises for a moment when many jobs change at once, and
            falls back to 0.""",
            unit=Unit.COUNT,
            minimum=0,
            queries=(Query(expr="sum(zerotrain_operator_queue_depth{OPERATOR})", legend="waiting jobs"),),
            alerts=("OperatorReconcileErrors",),
        ),
        Panel(
            title="Event loop",
            description="""How late the operator's event loop woke up. Above a second, something blocks it and
            probes may fail.""",
            unit=Unit.SECONDS,
            minimum=0,
            thresholds=at_least(1, Level.WARNING),
            queries=(
                Query(expr="max by (pod) (zerotrain_operator_loop_lag_seconds{OPERATOR})", legend="{{pod}}"),
            ),
            alerts=("OperatorDown",),
        ),
        Panel(
            title="Restarts of jobs by cause",
            description="""How often the operator started whole jobs again in the window, by what was at
            fault. infra on many jobs at once is a node, a switch or a drive.""",
            unit=Unit.COUNT,
            stacked=True,
            minimum=0,
            queries=(
                Query(
                    expr=f"sum by (cause) (increase(zerotrain_job_restarts_total{{OPERATOR}}[{WINDOW}]))",
                    legend="{{cause}}",
                ),
            ),
            alerts=("RestartLoop",),
        ),
    ),
)

_API = Row(
    title="The API server and the process",
    panels=(
        Panel(
            title="Requests by verb",
            description="""What the operator asks of the API server, per second. It grows with changes, not
            with the number of jobs.""",
            unit=Unit.PER_SECOND,
            minimum=0,
            queries=(
                Query(expr=f"sum by (verb) (rate({_REQUESTS}{{OPERATOR}}[{WINDOW}]))", legend="{{verb}}"),
            ),
        ),
        Panel(
            title="Answers by code",
            description="""409 is a conflict and normal now and then, 429 is the API server asking for
            patience, 403 is a missing permission, 0 no answer at all.""",
            unit=Unit.PER_SECOND,
            minimum=0,
            queries=(
                Query(expr=f"sum by (code) (rate({_REQUESTS}{{OPERATOR}}[{WINDOW}]))", legend="{{code}}"),
            ),
            alerts=("OperatorReconcileErrors",),
        ),
        Panel(
            title="Latency of requests, p99",
            description="""By verb, watches left out. Above a second the API server or etcd is in trouble, and
            so is every controller.""",
            unit=Unit.SECONDS,
            minimum=0,
            thresholds=at_least(1, Level.WARNING),
            queries=(
                Query(
                    expr=_quantile(0.99, "zerotrain_operator_api_request_duration_seconds", "verb"),
                    legend="{{verb}}",
                ),
            ),
        ),
        Panel(
            title="Requests by resource",
            description="""Which kinds of objects the requests are about, the busiest eight.""",
            unit=Unit.PER_SECOND,
            minimum=0,
            queries=(
                Query(
                    expr=f"topk(8, sum by (resource) (rate({_REQUESTS}{{OPERATOR}}[{WINDOW}])))",
                    legend="{{resource}}",
                ),
            ),
        ),
        Panel(
            title="Processor",
            description="""Processor seconds per second of each replica. A replica that stands by needs almost
            none.""",
            minimum=0,
            queries=(
                Query(
                    expr=f"sum by (pod) (rate(process_cpu_seconds_total{{OPERATOR}}[{WINDOW}]))",
                    legend="{{pod}}",
                ),
            ),
        ),
        Panel(
            title="Memory",
            description="""Resident memory of each replica; it grows with the number of jobs and pods that are
            watched, and is limited by the Deployment.""",
            unit=Unit.BYTES,
            minimum=0,
            queries=(Query(expr="max by (pod) (process_resident_memory_bytes{OPERATOR})", legend="{{pod}}"),),
        ),
        Panel(
            title="Where the operator runs",
            description="""Replica, node's address and version, and since when each runs.""",
            kind=PanelKind.TABLE,
            width=24,
            height=5,
            queries=(
                Query(
                    expr="""1000 * max by (pod, instance, version) (process_start_time_seconds{OPERATOR}
                    * on (instance) group_left (version) zerotrain_operator_info{OPERATOR})"""
                ),
            ),
            columns=(
                Column(label="pod", title="Pod"),
                Column(label="instance", title="Address"),
                Column(label="version", title="Version"),
                Column(label="Value", title="Started", unit=Unit.AGO),
            ),
        ),
    ),
)

OPERATOR = Dashboard(
    name="operator",
    title="zerotrain / Operator",
    description="""The controller: leadership, passes, queue, its requests to the API server, and the jobs it
    looks after.""",
    scope=Scope.OPERATOR,
    rows=(_HEALTH, _WORK, _API),
)
