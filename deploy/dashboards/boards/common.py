"""Panels and expressions that several boards share."""

from __future__ import annotations

from deploy.dashboards.model import Column, Level, Panel, PanelKind, Query, State, Threshold

PHASE_LEVELS: tuple[tuple[str, Level], ...] = (
    ("Queued", Level.NEUTRAL),
    ("Pending", Level.NEUTRAL),
    ("Starting", Level.INFO),
    ("Running", Level.GOOD),
    ("Restarting", Level.WARNING),
    ("Yielding", Level.WARNING),
    ("Suspending", Level.INFO),
    ("Suspended", Level.INFO),
    ("Stalled", Level.CRITICAL),
    ("Completed", Level.GOOD),
    ("Failed", Level.CRITICAL),
)
"""Colours of a job's phases."""

GOODPUT_OBJECTIVE = 0.95
"""Share of the wall time that should make progress; the burn-rate alerts are computed against it."""


def goodput(selector: str, window: str = "1h") -> str:
    """Return the productive share of a job's wall time, which includes time without any pod.

    `rate` divides by the whole window, also for a pod that existed in a part of it, so the sum over the pods
    of all attempts is correct. For a job that started or resumed within the window, the divisor is the time
    since then.
    """
    productive = (
        f"sum by (namespace, job_name) (rate(zerotrain_productive_seconds_total{{{selector}, "
        f'rank="0"}}[{window}]))'
    )
    seconds = {"5m": 300, "1h": 3600, "6h": 21600, "24h": 86400}[window]
    started = f"max by (namespace, job_name) (zerotrain_job_start_timestamp_seconds{{{selector}}})"
    return f"clamp_max({productive} / clamp_max((time() - {started}) / {seconds}, 1), 1)"


def firing_alerts(selector: str, *, width: int = 24, height: int = 6) -> Panel:
    """Return the panel of the alerts that fire now."""
    return Panel(
        title="Firing alerts",
        description="""Alerts of zerotrain's rules that fire now, worst first. Empty is healthy. Each has a
        runbook: `zerotrain explain alert NAME` prints it, docs/runbooks holds it.""",
        kind=PanelKind.TABLE,
        width=width,
        height=height,
        queries=(
            Query(
                expr=f"""max by (severity, alertname, namespace, job_name, rank)
                (ALERTS{{{selector}, alertstate="firing", alertname=~"ZeroTrain.+"}})"""
            ),
        ),
        columns=(
            Column(label="severity", title="Severity"),
            Column(label="alertname", title="Alert"),
            Column(label="namespace", title="Namespace"),
            Column(label="job_name", title="Job", board="job-overview"),
            Column(label="rank", title="Rank"),
        ),
        no_value="No alert fires",
    )


def at_least(value: float, level: Level, alert: str | None = None) -> tuple[Threshold, ...]:
    """Return a single threshold."""
    return (Threshold(value=value, level=level, alert=alert),)


def numbered(metric: str, selector: str, label: str, values: tuple[str, ...], *, by: str) -> str:
    """Return an expression for the number, from 1, of the value whose series is 1.

    A state timeline shows numbers under names.
    """
    terms = (
        f'{number} * {metric}{{{selector}, {label}="{value}"}}' for number, value in enumerate(values, 1)
    )
    return f"max by ({by}) ({' or '.join(terms)})"


def phase_timeline(*, width: int = 24, height: int = 5) -> Panel:
    """Return the panel of the job's phases over time, as the operator reported them."""
    return Panel(
        title="Phases of the job",
        description="""What the operator did with the job: Starting, Running, Restarting and so on. Healthy
        is one long Running; a saw-tooth of Restarting is a job that fails again and again.""",
        kind=PanelKind.STATE_TIMELINE,
        width=width,
        height=height,
        base=Level.NEUTRAL,
        queries=(
            Query(
                expr=numbered(
                    "zerotrain_job_phase", "JOB", "phase", tuple(dict(PHASE_LEVELS)), by="namespace, job_name"
                ),
                legend="{{job_name}}",
            ),
        ),
        states=tuple(
            State(value=number, text=phase, level=level)
            for number, (phase, level) in enumerate(PHASE_LEVELS, start=1)
        ),
        alerts=("RestartLoop", "JobPending", "JobFailed"),
    )
