"""Overview of one job: its state, its learning progress, the parts of its time, and its problems."""

from __future__ import annotations

from deploy.dashboards.boards.common import (
    GOODPUT_OBJECTIVE,
    PHASE_LEVELS,
    at_least,
    firing_alerts,
    goodput,
    phase_timeline,
)
from deploy.dashboards.model import Dashboard, Level, Panel, PanelKind, Query, Row, Scope, Threshold, Unit
from deploy.dashboards.selectors import WINDOW, mean, of_pod, quantile, rate

_STEPS = "zerotrain_step_duration_seconds"

_STATE = Row(
    title="State",
    panels=(
        Panel(
            title="Phase",
            description="""The phase of the job. Stalled and Failed need action: `zerotrain
            describe NAME` shows what happened and what to do next.""",
            kind=PanelKind.STAT,
            width=4,
            height=4,
            queries=(Query(expr="zerotrain_job_phase{JOB} == 1", legend="{{phase}}"),),
            series_levels=PHASE_LEVELS,
            shows_name=True,
            alerts=("JobFailed", "JobPending"),
        ),
        Panel(
            title="Progress",
            description="""Optimizer steps done of those that the job asks for, earlier attempts included.
            It falls after a restart by the steps since the last checkpoint.""",
            kind=PanelKind.BAR_GAUGE,
            width=5,
            height=4,
            unit=Unit.RATIO,
            base=Level.INFO,
            minimum=0,
            maximum=1,
            queries=(
                Query(
                    expr="max(zerotrain_job_step{JOB}) / max(zerotrain_job_total_steps{JOB})", legend="steps"
                ),
            ),
        ),
        Panel(
            title="Time left",
            description="""Steps that are left at the pace of the last minutes. Restarts to come are not in
            it.""",
            kind=PanelKind.STAT,
            width=3,
            height=4,
            unit=Unit.SECONDS,
            base=Level.NEUTRAL,
            queries=(
                Query(
                    expr=f"""(max by (namespace, job_name) (zerotrain_total_steps{{JOB}})
                    - max by (namespace, job_name) (zerotrain_step{{JOB}})) * ({mean(_STEPS)})""",
                    legend="left",
                ),
            ),
        ),
        Panel(
            title="Ranks up",
            description="""Rank processes that run, as a share of those the attempt must have. Below 100 % the
            others wait in a collective.""",
            kind=PanelKind.STAT,
            width=3,
            height=4,
            unit=Unit.RATIO,
            base=Level.CRITICAL,
            thresholds=at_least(1.0, Level.GOOD),
            queries=(
                Query(expr="sum(zerotrain_rank_up{JOB}) / max(zerotrain_world_size{JOB})", legend="ranks up"),
            ),
            alerts=("RankMissing", "MetricsAbsent"),
        ),
        Panel(
            title="Since the last step",
            description="""Time since any rank finished a step. Healthy is below a few step times; the
            operator takes stacks of all ranks when a hang is certain.""",
            kind=PanelKind.STAT,
            width=3,
            height=4,
            unit=Unit.SECONDS,
            base=Level.NEUTRAL,
            queries=(
                Query(
                    expr="time() - max(zerotrain_last_step_timestamp_seconds{JOB})",
                    legend="since the last step",
                ),
            ),
            alerts=("JobStalled",),
        ),
        Panel(
            title="Since the last checkpoint",
            description="""What a crash would cost now. Healthy is at most the checkpoint interval of the
            job.""",
            kind=PanelKind.STAT,
            width=3,
            height=4,
            unit=Unit.SECONDS,
            base=Level.NEUTRAL,
            queries=(
                Query(
                    expr="time() - max(zerotrain_last_checkpoint_timestamp_seconds{JOB})",
                    legend="since the last checkpoint",
                ),
            ),
            alerts=("CheckpointStale",),
        ),
        Panel(
            title="Restarts",
            description="""How often all ranks were started again, of every cause. The board Checkpoints and
            goodput shows the causes.""",
            kind=PanelKind.STAT,
            width=3,
            height=4,
            unit=Unit.COUNT,
            thresholds=at_least(1, Level.WARNING),
            queries=(Query(expr="sum(zerotrain_job_restarts_total{JOB})", legend="restarts"),),
            alerts=("RestartLoop",),
        ),
        phase_timeline(width=14),
        firing_alerts("JOB", width=10, height=5),
    ),
)

_LEARNING = Row(
    title="Does it learn",
    panels=(
        Panel(
            title="Loss",
            description="""Training loss, mean over all ranks. Healthy falls; a jump that stays after a
            restart means that data or weights are not the same as before. Gaps are NaN.""",
            queries=(Query(expr='zerotrain_loss{JOB, rank="0"}', legend="loss"),),
            alerts=("LossSpike", "NonFinite"),
        ),
        Panel(
            title="Gradient norm",
            description="""Global norm before clipping. A scrape sees one step of many: the spikes that it
            misses are counted in the engine and shown in the next panel.""",
            logarithmic=True,
            queries=(Query(expr='zerotrain_grad_norm{JOB, rank="0"}', legend="gradient norm"),),
            alerts=("GradNormSpike",),
        ),
        Panel(
            title="Steps that went wrong",
            description="""Steps with a spike of loss or gradient norm, with NaN or infinity, and updates left
            out because of an overflow, counted in the engine at every step. Healthy is 0; fp16 skips a few
            at the start while its loss scale settles.""",
            unit=Unit.COUNT,
            minimum=0,
            queries=tuple(
                Query(expr=f'sum(increase({name}{{JOB, rank="0"}}[{WINDOW}]))', legend=legend, exemplars=True)
                for name, legend in (
                    ("zerotrain_grad_norm_spikes_total", "gradient norm spikes"),
                    ("zerotrain_loss_spikes_total", "loss spikes"),
                    ("zerotrain_nonfinite_steps_total", "NaN or infinite"),
                    ("zerotrain_skipped_steps_total", "skipped for overflow"),
                )
            ),
            alerts=("GradNormSpike", "LossSpike", "NonFinite"),
        ),
        Panel(
            title="Tokens per second",
            description="""Of all ranks together. Healthy is flat: a step down that stays is a slow node,
            a slow drive or a neighbour on the network.""",
            unit=Unit.TOKENS_PER_SECOND,
            minimum=0,
            queries=(Query(expr=rate("zerotrain_tokens_total"), legend="tokens"),),
            alerts=("ThroughputLow",),
        ),
        Panel(
            title="MFU",
            description="""Model FLOPs utilisation, mean of the ranks: operations of the model by formula,
            without recomputation, as a part of the devices' peak. Empty where no peak is known.""",
            unit=Unit.RATIO,
            minimum=0,
            queries=(Query(expr="avg(zerotrain_mfu_ratio{JOB})", legend="MFU"),),
        ),
        Panel(
            title="Learning rate",
            description="""Of the last step: what the scheduler really did, also across restarts.""",
            unit=Unit.SCIENTIFIC,
            queries=(Query(expr='zerotrain_learning_rate{JOB, rank="0"}', legend="learning rate"),),
        ),
        Panel(
            title="Loss scale",
            description="""fp16 only: the factor on the loss, halved at every overflow. A fall towards 1 that
            does not end is a model that diverges. Other types show 1.""",
            logarithmic=True,
            queries=(Query(expr='zerotrain_loss_scale{JOB, rank="0"}', legend="loss scale"),),
            alerts=("LossScaleCollapse",),
        ),
    ),
)

_TIME = Row(
    title="Where the time goes",
    panels=(
        Panel(
            title="Step time",
            description="""Wall time of a step over all ranks: mean, median and the slowest percent. Click a
            diamond to see which step it was. Healthy is flat, with p99 near the median.""",
            unit=Unit.SECONDS,
            minimum=0,
            queries=(
                Query(expr=mean(_STEPS), legend="mean"),
                Query(expr=quantile(0.5, _STEPS), legend="p50"),
                Query(expr=quantile(0.99, _STEPS), legend="p99", exemplars=True),
            ),
            alerts=("StepTimeRegression",),
        ),
        Panel(
            title="A step by phase",
            description="""Mean seconds of a step that went into each phase, over all ranks. Data and
            checkpoint should be thin; a thick optimizer points to offloading.""",
            unit=Unit.SECONDS,
            stacked=True,
            minimum=0,
            queries=(
                Query(
                    expr=f"""{rate("zerotrain_phase_duration_seconds_sum", by="phase")}
                    / on (namespace, job_name) group_left () {rate(_STEPS + "_count")}""",
                    legend="{{phase}}",
                ),
            ),
            alerts=("OptimizerShareHigh", "DataStarved"),
        ),
        Panel(
            title="Time that a step does not compute",
            description="""Shares of the step time: waiting for data, waiting for other ranks, standing still
            for updates, waiting for the spill's drive. The largest is what to work on first.""",
            unit=Unit.RATIO,
            minimum=0,
            thresholds=(
                Threshold(value=0.2, level=Level.WARNING, alert="DataStarved"),
                Threshold(value=0.5, level=Level.WARNING, alert="OptimizerShareHigh"),
            ),
            queries=tuple(
                Query(expr=f"{rate(name)} / {rate(_STEPS + '_sum')}", legend=legend)
                for name, legend in (
                    ("zerotrain_data_wait_seconds_total", "waiting for data"),
                    ("zerotrain_collective_wait_seconds_total", "waiting for other ranks"),
                    ("zerotrain_optimizer_exposed_seconds_total", "standing still for updates"),
                    ("zerotrain_spill_wait_seconds_total", "waiting for the drive"),
                )
            ),
            alerts=("DataStarved", "OptimizerShareHigh"),
        ),
        Panel(
            title="Goodput of the last hour",
            description="""Share of the wall time that moved the model to a step never reached before, time
            without pods included. The objective is 95 %.""",
            unit=Unit.RATIO,
            base=Level.WARNING,
            minimum=0,
            maximum=1,
            thresholds=at_least(GOODPUT_OBJECTIVE, Level.GOOD),
            queries=(Query(expr=goodput("JOB"), legend="goodput"),),
            alerts=("GoodputBudgetBurn",),
        ),
        Panel(
            title="Memory near its limit",
            description="""The fullest of the job's containers and GPUs, as a share of what there is. At 100 %
            the kernel ends a rank, or CUDA refuses an allocation.""",
            unit=Unit.RATIO,
            minimum=0,
            maximum=1,
            thresholds=(Threshold(value=0.9, level=Level.WARNING, alert="HostMemoryNearLimit"),),
            queries=(
                Query(
                    expr="""max(zerotrain_host_memory_used_bytes{JOB}
                    / zerotrain_host_memory_limit_bytes{JOB})""",
                    legend="host",
                ),
                Query(
                    expr="max(zerotrain_gpu_memory_used_bytes{JOB} / zerotrain_gpu_memory_total_bytes{JOB})",
                    legend="GPU",
                ),
            ),
            alerts=("HostMemoryNearLimit", "GpuMemoryHeadroomLow"),
        ),
        Panel(
            title="GPU utilisation",
            description="""DCGM: share of the time in which the GPUs of the job's pods ran any kernel, and in
            which their tensor cores worked. High utilisation with idle tensor cores is a job that waits
            inside its kernels, mostly for the network. Needs dcgm-exporter.""",
            unit=Unit.RATIO,
            minimum=0,
            maximum=1,
            queries=(
                Query(
                    expr=f"avg by (job_name) ({of_pod('DCGM_FI_DEV_GPU_UTIL')}) / 100", legend="utilisation"
                ),
                Query(
                    expr=f"avg by (job_name) ({of_pod('DCGM_FI_PROF_PIPE_TENSOR_ACTIVE')})",
                    legend="tensor cores",
                ),
            ),
        ),
    ),
)

JOB_OVERVIEW = Dashboard(
    name="job-overview",
    title="zerotrain / Job overview",
    description="""One training job: its state, whether it learns, and where its time goes. Marks on the time
    axis are starts of attempts, durable checkpoints and firing alerts.""",
    scope=Scope.JOB,
    rows=(_STATE, _LEARNING, _TIME),
)
