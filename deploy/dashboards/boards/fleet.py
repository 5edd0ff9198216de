"""All jobs: their number, their state, those that need attention, and the use of the GPUs."""

from __future__ import annotations

from deploy.dashboards.boards.common import (
    GOODPUT_OBJECTIVE,
    PHASE_LEVELS,
    at_least,
    firing_alerts,
    goodput,
)
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
from deploy.dashboards.selectors import WINDOW, of_pod, rate

_UNFINISHED = 'zerotrain_job_phase{FLEET, phase!~"Completed|Failed"} == 1'
_AND = f"and on (namespace, job_name) ({_UNFINISHED})"
"""Restriction to unfinished jobs, because the operator exports finished jobs until they are deleted."""


def _of_unfinished(metric: str, *, over: str = "") -> str:
    """Return one value per unfinished job; with `over`, its ratio to that metric."""
    found = f"max by (namespace, job_name) ({metric}{{FLEET}})"
    if over:
        found += f" / max by (namespace, job_name) ({over}{{FLEET}})"
    return f"({found} {_AND})"


def _count(title: str, phases: str, description: str, *, bad_from: int | None = None) -> Panel:
    return Panel(
        title=title,
        description=description,
        kind=PanelKind.STAT,
        unit=Unit.COUNT,
        width=4,
        height=4,
        base=Level.GOOD if bad_from is not None else Level.NEUTRAL,
        thresholds=at_least(bad_from, Level.CRITICAL) if bad_from is not None else (),
        queries=(
            Query(
                expr=f'count(zerotrain_job_phase{{FLEET, phase=~"{phases}"}} == 1) or vector(0)',
                legend="jobs",
            ),
        ),
    )


_NOW = Row(
    title="Now",
    panels=(
        _count("Running", "Running", "Jobs whose ranks train now."),
        _count(
            "On their way",
            "Starting|Restarting|Yielding|Suspending",
            "Jobs between two states: starting, starting again, or making a checkpoint before they stop.",
        ),
        _count(
            "Waiting",
            "Queued|Pending",
            "Jobs that wait for a queue, a quota or free nodes. The table shows for how long.",
        ),
        _count(
            "Need action",
            "Stalled|Failed",
            "Jobs that the operator gave up on or that failed for good. Each needs a person; 0 is healthy.",
            bad_from=1,
        ),
        Panel(
            title="Goodput of the fleet",
            description="""Mean goodput of the last hour of the jobs that train: share of the wall time that
            moved their models.""",
            kind=PanelKind.STAT,
            unit=Unit.RATIO,
            width=4,
            height=4,
            base=Level.WARNING,
            thresholds=at_least(GOODPUT_OBJECTIVE, Level.GOOD),
            queries=(Query(expr=f"avg({goodput('FLEET')})", legend="goodput"),),
            alerts=("GoodputBudgetBurn",),
        ),
        Panel(
            title="Tokens per second",
            description="""Of all jobs together.""",
            kind=PanelKind.STAT,
            unit=Unit.TOKENS_PER_SECOND,
            width=4,
            height=4,
            base=Level.NEUTRAL,
            queries=(Query(expr=f"sum(rate(zerotrain_tokens_total{{FLEET}}[{WINDOW}]))", legend="tokens"),),
            alerts=("ThroughputLow",),
        ),
        firing_alerts("FLEET"),
    ),
)

_JOBS = Row(
    title="Jobs",
    panels=(
        Panel(
            title="Jobs",
            description="""Every job that is not finished, with what one asks first. Click a name for its
            overview. Progress counts earlier attempts; the age of the checkpoint is what a crash would
            cost.""",
            kind=PanelKind.TABLE,
            width=24,
            height=10,
            queries=(
                Query(expr="max by (namespace, job_name, phase) (" + _UNFINISHED + ")"),
                Query(expr=_of_unfinished("zerotrain_job_step", over="zerotrain_job_total_steps")),
                Query(expr=_of_unfinished("zerotrain_job_ranks_ready", over="zerotrain_job_ranks")),
                Query(expr=rate("zerotrain_tokens_total", "FLEET")),
                Query(expr=goodput("FLEET")),
                Query(expr=f"sum by (namespace, job_name) (zerotrain_job_restarts_total{{FLEET}}) {_AND}"),
                Query(expr="time() - " + _of_unfinished("zerotrain_job_last_checkpoint_timestamp_seconds")),
                Query(expr="time() - " + _of_unfinished("zerotrain_job_phase_since_timestamp_seconds")),
            ),
            columns=(
                Column(label="namespace", title="Namespace"),
                Column(label="job_name", title="Job", board="job-overview"),
                Column(label="phase", title="Phase"),
                Column(label="Value #A", title="Phase value", hidden=True),
                Column(label="Value #H", title="In this phase for", unit=Unit.SECONDS),
                Column(label="Value #B", title="Progress", unit=Unit.RATIO),
                Column(label="Value #C", title="Ranks ready", unit=Unit.RATIO),
                Column(label="Value #D", title="Tokens/s", unit=Unit.TOKENS_PER_SECOND),
                Column(label="Value #E", title="Goodput, 1 h", unit=Unit.RATIO),
                Column(
                    label="Value #F",
                    title="Restarts",
                    unit=Unit.COUNT,
                    thresholds=(Threshold(value=1, level=Level.WARNING),),
                ),
                Column(label="Value #G", title="Checkpoint age", unit=Unit.SECONDS),
            ),
            alerts=("JobFailed", "JobPending", "RestartLoop", "CheckpointStale"),
        ),
        Panel(
            title="Jobs by phase",
            description="""How the fleet's jobs are spread over the phases. A band of Restarting that does not
            close is a sick cluster.""",
            unit=Unit.COUNT,
            stacked=True,
            width=12,
            minimum=0,
            series_levels=PHASE_LEVELS,
            queries=(Query(expr="count by (phase) (zerotrain_job_phase{FLEET} == 1)", legend="{{phase}}"),),
            alerts=("JobPending", "JobFailed"),
        ),
        Panel(
            title="Tokens per second by job",
            description="""Throughput of each job. A step down in several jobs at once is the fabric or the
            storage that they share.""",
            unit=Unit.TOKENS_PER_SECOND,
            stacked=True,
            width=12,
            minimum=0,
            queries=(
                Query(expr=rate("zerotrain_tokens_total", "FLEET"), legend="{{namespace}}/{{job_name}}"),
            ),
            alerts=("ThroughputLow",),
        ),
        Panel(
            title="Longest waiting",
            description="""The ten jobs that have waited longest for a queue, a quota or free nodes.
            `zerotrain describe NAME` shows for what.""",
            kind=PanelKind.BAR_GAUGE,
            unit=Unit.SECONDS,
            thresholds=(Threshold(value=900, level=Level.WARNING, alert="JobPending"),),
            minimum=0,
            queries=(
                Query(
                    expr="""topk(10, (time() - zerotrain_job_phase_since_timestamp_seconds{FLEET})
                    and on (namespace, job_name)
                    (zerotrain_job_phase{FLEET, phase=~"Queued|Pending"} == 1))""",
                    legend="{{namespace}}/{{job_name}}",
                ),
            ),
            no_value="No job waits",
            alerts=("JobPending",),
        ),
        Panel(
            title="Lowest goodput",
            description="""The ten jobs that lost the largest share of the last hour.""",
            kind=PanelKind.BAR_GAUGE,
            unit=Unit.RATIO,
            base=Level.WARNING,
            thresholds=at_least(GOODPUT_OBJECTIVE, Level.GOOD),
            minimum=0,
            maximum=1,
            queries=(Query(expr=f"bottomk(10, {goodput('FLEET')})", legend="{{namespace}}/{{job_name}}"),),
            alerts=("GoodputBudgetBurn",),
        ),
        Panel(
            title="Restarts by cause",
            description="""Restarts of whole jobs in the window. infra on several jobs at once is a node, a
            switch or a drive that they share.""",
            unit=Unit.COUNT,
            stacked=True,
            minimum=0,
            queries=(
                Query(
                    expr=f"sum by (cause) (increase(zerotrain_job_restarts_total{{FLEET}}[{WINDOW}]))",
                    legend="{{cause}}",
                ),
            ),
            alerts=("RestartLoop",),
        ),
    ),
)

_HARDWARE = Row(
    title="Hardware",
    panels=(
        Panel(
            title="Workers wanted and ready",
            description="""Pods that the jobs ask for and pods that are ready. A gap that stays is capacity
            that is missing, or pods that cannot start.""",
            unit=Unit.COUNT,
            minimum=0,
            queries=(
                Query(expr="sum(zerotrain_job_workers{FLEET})", legend="wanted"),
                Query(expr="sum(zerotrain_job_workers_ready{FLEET})", legend="ready"),
            ),
            alerts=("RankMissing", "JobPending"),
        ),
        Panel(
            title="GPUs that train",
            description="""GPUs held by pods of zerotrain jobs, and those among them that do next to nothing
            (below 5 %). Idle ones belong to jobs that wait. Needs dcgm-exporter.""",
            unit=Unit.COUNT,
            minimum=0,
            queries=(
                Query(expr=f"count({of_pod('DCGM_FI_DEV_GPU_UTIL', 'FLEET')})", legend="held"),
                Query(
                    expr=f"count(({of_pod('DCGM_FI_DEV_GPU_UTIL', 'FLEET')}) < 5) or vector(0)", legend="idle"
                ),
            ),
        ),
        Panel(
            title="GPU utilisation by job",
            description="""Mean over the GPUs of the job's pods. The lowest lines are where hardware is paid
            for and not used. Needs dcgm-exporter.""",
            unit=Unit.RATIO,
            minimum=0,
            maximum=1,
            queries=(
                Query(
                    expr=f"avg by (job_name) ({of_pod('DCGM_FI_DEV_GPU_UTIL', 'FLEET')}) / 100",
                    legend="{{job_name}}",
                ),
            ),
        ),
    ),
)

FLEET = Dashboard(
    name="fleet",
    title="zerotrain / Fleet",
    description="""All training jobs of the chosen namespaces: start here, go on with a click on a job.""",
    scope=Scope.FLEET,
    rows=(_NOW, _JOBS, _HARDWARE),
)
