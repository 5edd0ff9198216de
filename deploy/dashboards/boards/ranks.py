"""The ranks of one job: slow, unresponsive and missing ranks, and their nodes."""

from __future__ import annotations

from deploy.dashboards.boards.common import numbered
from deploy.dashboards.model import (
    Column,
    Dashboard,
    Level,
    Panel,
    PanelKind,
    Query,
    Row,
    Scope,
    State,
    Threshold,
    Unit,
)
from deploy.dashboards.selectors import WINDOW, of_rank

_RANK_PHASES = ("init", "rendezvous", "first_step", "step", "checkpoint", "done")
_PHASE_LEVELS = (Level.NEUTRAL, Level.WARNING, Level.WARNING, Level.GOOD, Level.INFO, Level.GOOD)
_STRAGGLES_FROM = 1.5


def _per_step(counter: str) -> str:
    return (
        f"sum by (rank) (rate({counter}{{RANKS}}[{WINDOW}])) "
        f"/ sum by (rank) (rate(zerotrain_step_duration_seconds_count{{RANKS}}[{WINDOW}]))"
    )


_OWN = _per_step("zerotrain_step_own_seconds_total")
"""Seconds of a rank's own work per step. They exclude waiting for other ranks, so that they identify the slow
rank."""

_SLOW = Row(
    title="Slow ranks",
    panels=(
        Panel(
            title="Own work per step, by rank",
            description="""Seconds that a rank worked itself in a step, without waiting for others: the one
            bright row is the straggler. Step times do not show it, since all ranks wait for the slowest.""",
            kind=PanelKind.HEATMAP,
            unit=Unit.SECONDS,
            width=16,
            height=10,
            queries=(Query(expr=_OWN, legend="{{rank}}"),),
            alerts=("Straggler",),
        ),
        Panel(
            title="Slowest ranks against the median",
            description="""Own work of a rank divided by the median of all ranks: 1 is like the others. A rank
            that stays above the line slows the whole job down by as much; look at its node.""",
            kind=PanelKind.BAR_GAUGE,
            height=10,
            minimum=0,
            thresholds=(Threshold(value=_STRAGGLES_FROM, level=Level.WARNING, alert="Straggler"),),
            queries=(
                Query(expr=f"topk(10, ({_OWN}) / scalar(quantile(0.5, {_OWN})))", legend="rank {{rank}}"),
            ),
            alerts=("Straggler",),
        ),
        Panel(
            title="Waiting for others per step, by rank",
            description="""Seconds per step in which a rank could do nothing but wait for collectives. The
            straggler is the *dark* row here: it never waits, the others wait for it.""",
            kind=PanelKind.HEATMAP,
            unit=Unit.SECONDS,
            width=12,
            queries=(Query(expr=_per_step("zerotrain_collective_wait_seconds_total"), legend="{{rank}}"),),
            alerts=("Straggler",),
        ),
        Panel(
            title="Waiting for data per step, by rank",
            description="""Seconds per step spent waiting for the next batch. One bright row is one slow disk
            or mount; all rows bright is a data source that is too slow.""",
            kind=PanelKind.HEATMAP,
            unit=Unit.SECONDS,
            width=12,
            queries=(Query(expr=_per_step("zerotrain_data_wait_seconds_total"), legend="{{rank}}"),),
            alerts=("DataStarved",),
        ),
        Panel(
            title="Straggler named by the operator",
            description="""The rank that the operator holds for a straggler, and its own work against the
            median of all ranks. Empty is healthy; `zerotrain describe` shows its node.""",
            width=12,
            minimum=1,
            queries=(Query(expr="zerotrain_job_straggler_ratio{JOB}", legend="rank {{rank}}"),),
            no_value="No rank straggles",
            alerts=("Straggler",),
        ),
        Panel(
            title="Spread of the own work",
            description="""Own work per step of the fastest, the median and the slowest rank. The distance
            between median and slowest is what a straggler costs the job.""",
            unit=Unit.SECONDS,
            width=12,
            minimum=0,
            queries=(
                Query(expr=f"max({_OWN})", legend="slowest"),
                Query(expr=f"quantile(0.5, {_OWN})", legend="median"),
                Query(expr=f"min({_OWN})", legend="fastest"),
            ),
            alerts=("Straggler",),
        ),
    ),
)

_ALIVE = Row(
    title="Ranks",
    panels=(
        Panel(
            title="Ranks up",
            description="""One line per rank: its process runs or has ended. A line that stops is a pod whose
            metrics are not scraped any more.""",
            kind=PanelKind.STATUS_HISTORY,
            width=12,
            base=Level.CRITICAL,
            thresholds=(Threshold(value=1, level=Level.GOOD),),
            states=(
                State(value=0, text="down", level=Level.CRITICAL),
                State(value=1, text="up", level=Level.GOOD),
            ),
            queries=(Query(expr="max by (rank) (zerotrain_rank_up{RANKS})", legend="{{rank}}"),),
            alerts=("RankMissing", "MetricsAbsent"),
        ),
        Panel(
            title="What each rank does",
            description="""The phase that a rank last reported. In a hang one rank is in another phase than
            the rest, or all wait in the same step for one that is gone.""",
            kind=PanelKind.STATE_TIMELINE,
            width=12,
            base=Level.NEUTRAL,
            states=tuple(
                State(value=number, text=phase.replace("_", " "), level=level)
                for number, (phase, level) in enumerate(
                    zip(_RANK_PHASES, _PHASE_LEVELS, strict=True), start=1
                )
            ),
            queries=(
                Query(
                    expr=numbered("zerotrain_rank_phase", "RANKS", "phase", _RANK_PHASES, by="rank"),
                    legend="{{rank}}",
                ),
            ),
            alerts=("JobStalled",),
        ),
        Panel(
            title="Steps done, by rank",
            description="""Ranks of one job move together: lines that part are ranks that do not talk to each
            other any more.""",
            unit=Unit.COUNT,
            width=12,
            queries=(Query(expr="max by (rank) (zerotrain_step{RANKS})", legend="{{rank}}"),),
            alerts=("JobStalled",),
        ),
        Panel(
            title="Since the last message, by rank",
            description="""Time since the last report of a rank to its launcher. Ranks report every few
            seconds, in long checkpoints too; one that is silent is stuck inside a call.""",
            unit=Unit.SECONDS,
            width=12,
            minimum=0,
            queries=(
                Query(
                    expr="""max by (rank) (time() - zerotrain_rank_last_report_timestamp_seconds{RANKS})""",
                    legend="{{rank}}",
                ),
            ),
            alerts=("JobStalled",),
        ),
        Panel(
            title="Replicas that differ",
            description="""Comparisons of what must be equal on all ranks that found this rank different from
            rank 0. Healthy is 0 for ever: anything else is broken memory, a broken GPU or a bug.""",
            unit=Unit.COUNT,
            width=12,
            minimum=0,
            queries=(
                Query(
                    expr=f"""sum by (rank)
                    (increase(zerotrain_state_digest_mismatch_total{{RANKS}}[{WINDOW}]))""",
                    legend="{{rank}}",
                ),
            ),
            alerts=("ReplicaDivergence",),
        ),
        Panel(
            title="Where the ranks are",
            description="""Pod, node and device of each rank of the attempt that runs now. Sort by node to see
            what a slow node carries.""",
            kind=PanelKind.TABLE,
            width=12,
            queries=(
                Query(
                    expr="""max by (rank, pod, node, attempt, local_rank, device, transport, version)
                    (zerotrain_rank_info{RANKS})"""
                ),
            ),
            columns=tuple(
                Column(label=label, title=title)
                for label, title in (
                    ("rank", "Rank"),
                    ("pod", "Pod"),
                    ("node", "Node"),
                    ("attempt", "Attempt"),
                    ("local_rank", "Local rank"),
                    ("device", "Device"),
                    ("transport", "Transport"),
                    ("version", "Version"),
                )
            ),
        ),
    ),
)


def _gpu(
    title: str, description: str, series: str, unit: Unit, *, scale: str = "", alerts: tuple[str, ...] = ()
) -> Panel:
    return Panel(
        title=title,
        description=f"{description} From dcgm-exporter, joined to the rank by the GPU's UUID.",
        unit=unit,
        minimum=0,
        queries=(Query(expr=f"({of_rank(series)}){scale}", legend="rank {{rank}}"),),
        alerts=alerts,
    )


_GPUS = Row(
    title="GPUs of the ranks",
    panels=(
        _gpu(
            "Utilisation by rank",
            "Share of the time with any kernel running; the straggler is busy while the others idle.",
            "DCGM_FI_DEV_GPU_UTIL",
            Unit.RATIO,
            scale=" / 100",
        ),
        _gpu(
            "Tensor cores by rank",
            "Share of the time in which tensor cores worked: the part of utilisation that trains.",
            "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
            Unit.RATIO,
        ),
        _gpu(
            "Clock by rank",
            "SM clock. A GPU whose clock falls while its neighbours' stays is throttled by heat or power.",
            "DCGM_FI_DEV_SM_CLOCK",
            Unit.HERTZ,
            scale=" * 1e6",
            alerts=("GpuThrottled",),
        ),
        _gpu(
            "Temperature by rank",
            "GPU temperature; most data centre GPUs slow down in the high eighties.",
            "DCGM_FI_DEV_GPU_TEMP",
            Unit.CELSIUS,
        ),
        _gpu(
            "Power by rank",
            "A GPU far below its neighbours computes less, one at its cap is throttled.",
            "DCGM_FI_DEV_POWER_USAGE",
            Unit.WATTS,
        ),
        Panel(
            title="Last Xid by rank",
            description="""The newest error number of the driver for the rank's GPU; it stays until the next
            one, so look at when it changed. 0 is healthy; 48, 63, 64, 74, 79, 94 and 95 are hardware. From
            dcgm-exporter, joined to the rank by the GPU's UUID.""",
            kind=PanelKind.STATUS_HISTORY,
            thresholds=(Threshold(value=1, level=Level.CRITICAL),),
            queries=(Query(expr=of_rank("DCGM_FI_DEV_XID_ERRORS"), legend="rank {{rank}}"),),
            alerts=("GpuFault",),
        ),
    ),
)

RANKS = Dashboard(
    name="ranks",
    title="zerotrain / Ranks and stragglers",
    description="""The ranks of one job side by side: own work, waiting, phases, places and GPUs. Choose ranks
    above where there are many.""",
    scope=Scope.JOB,
    rows=(_SLOW, _ALIVE, _GPUS),
)
