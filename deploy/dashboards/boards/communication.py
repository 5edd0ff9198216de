"""Collectives of one job: latency, bandwidth, waiting, and the links underneath."""

from __future__ import annotations

from deploy.dashboards.model import Dashboard, Level, Panel, PanelKind, Query, Row, Scope, Threshold, Unit
from deploy.dashboards.selectors import WINDOW, of_rank, quantile, rate

_COLLECTIVE = "zerotrain_collective_duration_seconds"
_STEPS = "zerotrain_step_duration_seconds"


def _latency(op: str, alert: str, why: str) -> Panel:
    selector = f'JOB, op="{op}"'
    return Panel(
        title=f"{op.replace('_', '-').capitalize()} latency",
        description=f"""Start to completion over all ranks: median, the slowest tenth and the slowest percent.
        {why} A p99 far above the median is one slow link or one late rank.""",
        unit=Unit.SECONDS,
        width=12,
        minimum=0,
        thresholds=(Threshold(value=1.0, level=Level.WARNING, alert=alert),),
        queries=tuple(
            Query(expr=quantile(share, _COLLECTIVE, selector), legend=legend)
            for share, legend in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
        ),
        alerts=(alert,),
    )


def _histogram(op: str) -> Panel:
    return Panel(
        title=f"{op.replace('_', '-').capitalize()} latencies",
        description="""How many operations per second took how long, over all ranks. Two bands are two kinds
        of partners: inside a node and across; a new band above is a link that degraded.""",
        kind=PanelKind.HEATMAP,
        unit=Unit.SECONDS,
        width=12,
        queries=(
            Query(
                expr=f'sum by (le) (rate({_COLLECTIVE}_bucket{{JOB, op="{op}"}}[{WINDOW}]))',
                legend="{{le}}",
                buckets=True,
            ),
        ),
    )


_LATENCY = Row(
    title="Latency",
    panels=(
        _latency("all_gather", "AllGatherP99", "Parameters of stage 3 and updated weights come this way."),
        _latency("reduce_scatter", "ReduceScatterP99", "Gradients go this way."),
        _histogram("all_gather"),
        _histogram("reduce_scatter"),
    ),
)

_COST = Row(
    title="What it costs",
    panels=(
        Panel(
            title="Share of the step spent waiting",
            description="""Step time in which ranks could do nothing but wait for collectives. Healthy is
            below a third; on CUDA it is the stream that waits; the tensor cores show the rest.""",
            unit=Unit.RATIO,
            minimum=0,
            maximum=1,
            queries=(
                Query(
                    expr=f"{rate('zerotrain_collective_wait_seconds_total')} / {rate(_STEPS + '_sum')}",
                    legend="waiting",
                ),
            ),
        ),
        Panel(
            title="Seconds per step, by operation",
            description="""Time of the operations of one step, mean of the ranks. They overlap with compute,
            so the sum may exceed the waiting. `record` is the tiny step record: its time is waiting for the
            slowest rank.""",
            unit=Unit.SECONDS,
            stacked=True,
            minimum=0,
            queries=(
                Query(
                    expr=f"""{rate(_COLLECTIVE + "_sum", by="op")}
                    / on (namespace, job_name) group_left () {rate(_STEPS + "_count")}""",
                    legend="{{op}}",
                ),
            ),
            alerts=("Straggler",),
        ),
        Panel(
            title="Operations per step",
            description="""How many collectives one step of one rank takes. It follows from bucket sizes and
            the stage: thousands of small ones mean that the buckets are too small.""",
            unit=Unit.COUNT,
            minimum=0,
            queries=(
                Query(
                    expr=f"""{rate(_COLLECTIVE + "_count", by="op")}
                    / on (namespace, job_name) group_left () {rate(_STEPS + "_count")}""",
                    legend="{{op}}",
                ),
            ),
        ),
        Panel(
            title="Payload",
            description="""Bytes per second that the ranks gave to other ranks, by operation, all ranks
            together.""",
            unit=Unit.BYTES_PER_SECOND,
            stacked=True,
            minimum=0,
            queries=(Query(expr=rate("zerotrain_collective_bytes_total", by="op"), legend="{{op}}"),),
        ),
        Panel(
            title="Bandwidth while an operation runs",
            description="""Payload divided by the time of the operations, mean of the ranks: compare it with
            what the link can do. Low with low latency means small buckets, low with high latency means a
            busy or broken link.""",
            unit=Unit.BYTES_PER_SECOND,
            minimum=0,
            queries=(
                Query(
                    expr=f"""{rate("zerotrain_collective_bytes_total", 'JOB, op!="record"', by="op")}
                    / {rate(_COLLECTIVE + "_sum", 'JOB, op!="record"', by="op")}""",
                    legend="{{op}}",
                ),
            ),
            alerts=("AllGatherP99", "ReduceScatterP99"),
        ),
        Panel(
            title="Slowest ranks at gathering",
            description="""p99 of the all-gather by rank, the ten slowest. All alike is the fabric; one rank
            is its link or its node.""",
            kind=PanelKind.BAR_GAUGE,
            unit=Unit.SECONDS,
            minimum=0,
            thresholds=(Threshold(value=1.0, level=Level.WARNING, alert="AllGatherP99"),),
            queries=(
                Query(
                    expr=f"""topk(10, {quantile(0.99, _COLLECTIVE, 'RANKS, op="all_gather"', by="rank")})""",
                    legend="rank {{rank}}",
                ),
            ),
            alerts=("AllGatherP99", "Straggler"),
        ),
    ),
)

_LINKS = Row(
    title="Links underneath",
    panels=(
        Panel(
            title="NVLink traffic by rank",
            description="""Traffic of the NVLinks of the rank's GPU: collectives inside a node. Near 0 with
            several ranks per node means that NCCL goes around them. From dcgm-exporter with the counters
            that the chart ships (its own list lacks them), joined to the rank by the GPU's UUID.""",
            unit=Unit.BYTES_PER_SECOND,
            width=12,
            minimum=0,
            queries=(
                Query(
                    expr=f"{of_rank('DCGM_FI_PROF_NVLINK_TX_BYTES')} "
                    f"+ {of_rank('DCGM_FI_PROF_NVLINK_RX_BYTES')}",
                    legend="rank {{rank}}",
                ),
            ),
        ),
        Panel(
            title="PCIe traffic by rank",
            description="""Traffic between GPU and host: offloading, and collectives that leave the node. From
            dcgm-exporter, joined to the rank by the GPU's UUID.""",
            unit=Unit.BYTES_PER_SECOND,
            width=12,
            minimum=0,
            queries=(
                Query(
                    expr=f"{of_rank('DCGM_FI_PROF_PCIE_TX_BYTES')} + {of_rank('DCGM_FI_PROF_PCIE_RX_BYTES')}",
                    legend="rank {{rank}}",
                ),
            ),
        ),
    ),
)

COMMUNICATION = Dashboard(
    name="communication",
    title="zerotrain / Communication",
    description="""The collectives of one job: how long they take, what they cost the step, and which rank or
    link is behind it.""",
    scope=Scope.JOB,
    rows=(_LATENCY, _COST, _LINKS),
)
