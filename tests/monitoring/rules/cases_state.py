"""Cases about the state of a job: numerics, checkpoints, spill, memory, GPUs."""

from __future__ import annotations

from tests.monitoring.rules.cases_progress import GPT, job
from tests.monitoring.rules.model import NAN, Case, Firing, Training, Value, flat, merged, pulse, ramp, series

TEAM = Training(ranks=2)


def counted(
    alert: str, counter: str, *, severity: str, minutes: int, per_rank: float = 1.0
) -> tuple[Case, ...]:
    """Cases of an alert on a counter: one event on both ranks fires one alert at once, for `minutes`; a
    constant counter never fires.
    """
    count = 20 + minutes * 2 + 20
    young = Training(ranks=2, attempt=2, begin=20)
    return (
        Case(
            alert=alert,
            name="what a new pod counted before its first scrape is news",
            series=merged(
                young.of_ranks(counter, flat(per_rank, count)),
                young.of_ranks("zerotrain_attempt_start_timestamp_seconds", flat(585, count)),
            ),
            fires=(Firing(labels=GPT, severity=severity, from_s=600, until_s=600 + 60 * minutes),),
        ),
        Case(
            alert=alert,
            name="a new pod that has counted nothing",
            series=merged(
                young.of_ranks(counter, flat(0, count)),
                young.of_ranks("zerotrain_attempt_start_timestamp_seconds", flat(585, count)),
            ),
            quiet_at_s=(600, 900),
        ),
        Case(
            alert=alert,
            name="one event on every rank is one alert",
            series=TEAM.of_ranks(counter, pulse(20, per_rank, count - 20)),
            fires=(Firing(labels=GPT, severity=severity, from_s=600, until_s=600 + 60 * minutes - 30),),
        ),
        Case(
            alert=alert,
            name="what happened before is not news",
            series=TEAM.of_ranks(counter, flat(3, count)),
            quiet_at_s=(0, 300, 600, 900),
        ),
    )


def failed(alert: str, minutes: int, severity: str, **labels: str) -> Case:
    """Case of an attempt whose end only the operator saw: no scrape has the event."""
    failure_labels = {"reason": "RankFailed", "exit_code": "1", "exception": "", **labels}
    other = {"reason": "NodeLost", "exit_code": "", "exception": ""}
    samples = 20 + minutes * 2 + 20
    return Case(
        alert=alert,
        name=f"an attempt ended with {labels}",
        series=merged(
            job(
                "zerotrain_job_failure_timestamp_seconds",
                [*flat(None, 20), *flat(590, samples)],
                **failure_labels,
            ),
            job("zerotrain_job_failure_timestamp_seconds", ramp(0, 30, samples), **other),
        ),
        fires=(Firing(labels=GPT, severity=severity, from_s=600, until_s=600 + 60 * minutes),),
    )


def numerics() -> tuple[Case, ...]:
    steps = "zerotrain_step_duration_seconds_count"

    def skipping(share: float) -> dict[str, list[Value]]:
        values: list[Value] = [0.0]
        for index in range(159):
            values.append((values[-1] or 0.0) + (30 * share if 40 <= index < 110 else 0.0))
        return merged(  # type: ignore[return-value]
            TEAM.of_ranks(steps, ramp(0, 30, 160)), TEAM.of_ranks("zerotrain_skipped_steps_total", values)
        )

    nan = Case(
        alert="ZeroTrainGradNormSpike",
        name="the norm itself says nothing before the first step",
        series=merged(
            TEAM.of_ranks("zerotrain_grad_norm", flat(NAN, 40)),
            TEAM.of_ranks("zerotrain_grad_norm_spikes_total", flat(0, 40)),
        ),
        quiet_at_s=(0, 600, 1170),
    )
    descent: list[Value] = [*ramp(0, 5, 4), *flat(15, 96)]
    return (
        *counted("ZeroTrainNonFinite", "zerotrain_nonfinite_steps_total", severity="critical", minutes=15),
        failed("ZeroTrainNonFinite", 15, "critical", exit_code="83", exception="Diverged"),
        *counted(
            "ZeroTrainGradNormSpike", "zerotrain_grad_norm_spikes_total", severity="warning", minutes=15
        ),
        nan,
        *counted("ZeroTrainLossSpike", "zerotrain_loss_spikes_total", severity="warning", minutes=15),
        *counted(
            "ZeroTrainReplicaDivergence",
            "zerotrain_state_digest_mismatch_total",
            severity="critical",
            minutes=60,
        ),
        Case(
            alert="ZeroTrainLossScaleCollapse",
            name="every third step is left out",
            series=skipping(0.33),
            fires=(Firing(labels=GPT, from_s=2670, until_s=3660),),
        ),
        Case(
            alert="ZeroTrainLossScaleCollapse",
            name="18 %",
            series=skipping(0.18),
            quiet_at_s=(1800, 2700, 3300),
        ),
        Case(
            alert="ZeroTrainLossScaleCollapse",
            name="the descent from the initial scale, at steps of ten seconds",
            series=merged(
                TEAM.of_ranks(steps, ramp(0, 3, 100)), TEAM.of_ranks("zerotrain_skipped_steps_total", descent)
            ),
            quiet_at_s=(600, 900, 1200, 1500),
        ),
        Case(
            alert="ZeroTrainLossScaleCollapse",
            name="no steps, no share",
            series=merged(
                TEAM.of_ranks(steps, flat(5, 100)),
                TEAM.of_ranks("zerotrain_skipped_steps_total", ramp(0, 1, 100)),
            ),
            quiet_at_s=(1500, 1800, 2700),
        ),
    )


def checkpoints() -> tuple[Case, ...]:
    stale, failing = "ZeroTrainCheckpointStale", "ZeroTrainCheckpointFailed"

    def age(
        committed: list[Value], start: list[Value] | None, *, interval: float = 600.0, count: int = 160
    ) -> dict[str, list[Value]]:
        return merged(  # type: ignore[return-value]
            TEAM.of_ranks("zerotrain_last_checkpoint_timestamp_seconds", committed),
            TEAM.of_ranks("zerotrain_checkpoint_interval_seconds", flat(interval, count)),
            {} if start is None else TEAM.of_rank(0, "zerotrain_attempt_start_timestamp_seconds", start),
        )

    return (
        Case(
            alert=stale,
            name="an interval of ten minutes, the last one after a quarter of an hour, the next much later",
            series=age([*flat(900, 120), *flat(3600, 40)], flat(0, 160)),
            fires=(Firing(labels=GPT, from_s=2730, until_s=3600),),
        ),
        Case(
            alert=stale,
            name="a launcher that does not say when it started",
            series=age(flat(900, 160), None),
            fires=(Firing(labels=GPT, from_s=2730),),
        ),
        Case(
            alert=stale,
            name="a job that was suspended is as old as its attempt",
            series=age(flat(0, 160), flat(3000, 160)),
            quiet_at_s=(1800, 2700, 3300, 4500),
        ),
        Case(
            alert=stale,
            name="a job without a policy",
            series=age(flat(0, 160), flat(0, 160), interval=0.0),
            quiet_at_s=(1800, 2700, 3300, 4500),
        ),
        *counted(failing, "zerotrain_checkpoint_failures_total", severity="critical", minutes=60),
        failed(failing, 60, "critical", exit_code="66"),
        failed(failing, 60, "critical", exception="CheckpointNoSpace"),
        Case(
            alert="ZeroTrainCheckpointVerifyFailed",
            name="the verification found damage",
            series=job("zerotrain_job_checkpoint_verification_failed", [*pulse(10, 1, 10), *flat(0, 10)]),
            fires=(Firing(labels=GPT, severity="critical", from_s=300, until_s=600),),
        ),
        Case(
            alert="ZeroTrainCheckpointVerifyFailed",
            name="the verification found damage in what a job left behind: news for a day",
            interval_s=300,
            series=merged(
                job("zerotrain_job_checkpoint_verification_failed", pulse(10, 1, 300)),
                job("zerotrain_job_completion_timestamp_seconds", [*flat(None, 8), *flat(2700, 302)]),
            ),
            fires=(Firing(labels=GPT, severity="critical", from_s=3000, until_s=89100),),
        ),
        Case(
            alert="ZeroTrainCheckpointVerifyFailed",
            name="an attempt of weeks passed over a damaged one in its first minutes: news for a day",
            interval_s=300,
            series=merged(
                TEAM.of_ranks("zerotrain_checkpoint_rejected", pulse(10, 1, 300)),
                TEAM.of_ranks("zerotrain_attempt_start_timestamp_seconds", flat(2700, 310)),
            ),
            fires=(Firing(labels=GPT, severity="critical", from_s=3000, until_s=89100),),
        ),
        Case(
            alert="ZeroTrainCheckpointVerifyFailed",
            name="an attempt passed over a damaged one",
            series=TEAM.of_ranks("zerotrain_checkpoint_rejected", [*pulse(10, 1, 10), *flat(0, 10)]),
            fires=(Firing(labels=GPT, severity="critical", from_s=300, until_s=600),),
        ),
    )


def spill() -> tuple[Case, ...]:
    filling, slow = "ZeroTrainSpillFillingUp", "ZeroTrainSpillBandwidthBelowCalibration"
    gib = float(1 << 30)

    def free(values: list[float]) -> dict[str, list[Value]]:
        return merged(  # type: ignore[return-value]
            TEAM.of_rank(0, "zerotrain_spill_free_bytes", [value * gib for value in values]),
            TEAM.of_rank(1, "zerotrain_spill_free_bytes", flat(500 * gib, len(values))),
        )

    def drive(bandwidth: float, waiting: float) -> dict[str, list[Value]]:
        moved: list[Value] = [0.0]
        waited: list[Value] = [0.0]
        for index in range(159):
            worse = 40 <= index < 110
            moved.append((moved[-1] or 0.0) + 10 * gib * (bandwidth if worse else 0.9))
            waited.append((waited[-1] or 0.0) + 10 * waiting)
        return merged(  # type: ignore[return-value]
            TEAM.of_ranks("zerotrain_spill_calibrated_bytes_per_second", flat(gib, 160)),
            TEAM.of_ranks("zerotrain_spill_pass_seconds_total", ramp(0, 10, 160)),
            TEAM.of_rank(0, "zerotrain_spill_pass_bytes_total", moved),
            TEAM.of_rank(1, "zerotrain_spill_pass_bytes_total", ramp(0, 9 * gib, 160)),
            TEAM.of_ranks("zerotrain_spill_wait_seconds_total", waited),
        )

    steady = [100.0] * 40
    return (
        Case(
            alert=filling,
            name="sixty gibibytes an hour from twenty minutes on, for an hour",
            series=free(steady + [100 - index / 2 for index in range(120)] + [40.0] * 90),
            fires=(Firing(labels=GPT, from_s=3510, until_s=5700),),
        ),
        Case(
            alert=filling,
            name="full",
            series=free([0.0] * 80),
            fires=(Firing(labels=GPT, from_s=1830),),
        ),
        Case(
            alert=filling,
            name="slow enough for a night",
            series=free(steady + [100 - index / 40 for index in range(160)]),
            quiet_at_s=(3600, 4500, 5700),
        ),
        Case(
            alert=filling,
            name="the spill itself is allocated after the first scrape",
            series=free([1000.0, 900.0, 400.0] + [10.0] * 160),
            quiet_at_s=(900, 1500, 1800, 2100, 3600),
        ),
        *counted(
            "ZeroTrainSpillIOErrors", "zerotrain_spill_io_errors_total", severity="critical", minutes=60
        ),
        failed("ZeroTrainSpillIOErrors", 60, "critical", exception="SpillIOError"),
        *counted(
            "ZeroTrainSpillAuthFailure",
            "zerotrain_spill_auth_failures_total",
            severity="critical",
            minutes=60,
        ),
        failed("ZeroTrainSpillAuthFailure", 60, "critical", exit_code="84", exception="SpillIntegrityError"),
        Case(
            alert="ZeroTrainSpillNotEncrypted",
            name="plain on both ranks",
            series=TEAM.of_ranks("zerotrain_spill_info", [*flat(None, 5), *flat(1, 20)], encryption="None"),
            fires=(Firing(labels=GPT, from_s=150),),
        ),
        Case(
            alert="ZeroTrainSpillNotEncrypted",
            name="encrypted",
            series=TEAM.of_ranks("zerotrain_spill_info", flat(1, 20), encryption="AEAD"),
            quiet_at_s=(0, 300, 570),
        ),
        Case(
            alert=slow,
            name="a drive at two fifths of its pace, and updates wait for it",
            series=drive(0.4, 0.8),
            fires=(Firing(labels=GPT, from_s=2820, until_s=3480),),
        ),
        Case(
            alert=slow,
            name="updates wait for it during 53 % of a pass",
            series=drive(0.4, 0.53),
            fires=(Firing(labels=GPT, from_s=2820, until_s=3480),),
        ),
        Case(alert=slow, name="at 55 %", series=drive(0.55, 0.8), quiet_at_s=(2700, 3000, 3300)),
        Case(alert=slow, name="nobody waits for it", series=drive(0.4, 0.45), quiet_at_s=(2700, 3000, 3300)),
    )


def memory() -> tuple[Case, ...]:
    gib = float(1 << 30)

    def worker(used: float) -> dict[str, list[Value]]:
        values: list[Value] = [*flat(40 * gib, 20), *flat(used * gib, 20), *flat(40 * gib, 20)]
        return {
            series("zerotrain_host_memory_used_bytes", job_name="gpt", worker="1", pod="gpt-1-1"): values,
            series("zerotrain_host_memory_limit_bytes", job_name="gpt", worker="1", pod="gpt-1-1"): flat(
                100 * gib, 60
            ),
            series("zerotrain_host_memory_used_bytes", job_name="gpt", worker="0", pod="gpt-1-0"): flat(
                5, 60
            ),
            series("zerotrain_host_memory_limit_bytes", job_name="gpt", worker="0", pod="gpt-1-0"): flat(
                0, 60
            ),
        }

    def gpu(peak: float) -> dict[str, list[Value]]:
        return merged(  # type: ignore[return-value]
            TEAM.of_ranks(
                "zerotrain_gpu_memory_allocated_peak_bytes", [*flat(40 * gib, 20), *flat(peak * gib, 60)]
            ),
            TEAM.of_rank(0, "zerotrain_gpu_memory_total_bytes", flat(80 * gib, 80)),
            TEAM.of_rank(1, "zerotrain_gpu_memory_total_bytes", flat(0, 80)),
        )

    return (
        Case(
            alert="ZeroTrainHostMemoryNearLimit",
            name="one worker at 92 % for ten minutes; another without a limit",
            series=worker(92),
            fires=(Firing(labels=GPT, from_s=900, until_s=1200),),
        ),
        Case(
            alert="ZeroTrainHostMemoryNearLimit", name="88 %", series=worker(88), quiet_at_s=(600, 900, 1170)
        ),
        Case(
            alert="ZeroTrainGpuMemoryHeadroomLow",
            name="a peak of 97 %",
            series=gpu(77.6),
            fires=(Firing(labels=GPT, from_s=1200),),
        ),
        Case(
            alert="ZeroTrainGpuMemoryHeadroomLow",
            name="a peak of 93 %",
            series=gpu(74.4),
            quiet_at_s=(900, 1500, 2300),
        ),
    )


XIDS = (46, 48, 62, 64, 74, 79, 94, 95, 109, 119, 120, 136, 140, 143)
REASONS = {8: "hardware slowdown", 32: "software thermal", 64: "hardware thermal", 128: "power brake"}
HARMLESS = (1, 4 + 2 + 16 + 256, 4 + 2 + 1 + 16 + 256, 512, 1024)
"""Bits for an idle GPU and for caps by power or by settings, and bits that have no meaning yet."""


def dcgm(metric: str, gpu: int, values: list[Value]) -> dict[str, list[Value]]:
    """Return a series as dcgm-exporter gives it, with labels of the GPU and of the exporter, not of
    the job.
    """
    labels = {"UUID": f"GPU-{gpu}", "gpu": str(gpu), "Hostname": "node-1-0", "pod": "dcgm-x"}
    return {series(metric, namespace="gpu-operator", **labels): values}


def on_gpu(rank: int, gpu: int, count: int, *, attempt: int = 1) -> dict[str, list[Value]]:
    """Return the rank's info metric with its GPU."""
    team = Training(ranks=64, attempt=attempt)
    return team.of_rank(
        rank, "zerotrain_rank_info", flat(1, count), gpu_uuid=f"GPU-{gpu}", attempt=str(attempt)
    )


def under(rank: int, gpu: int, **more: str) -> dict[str, str]:
    """Labels of an alert on the GPU of a rank."""
    team = Training(ranks=64)
    return {**GPT, **team.labels(rank), "UUID": f"GPU-{gpu}", **more}


def gpus() -> tuple[Case, ...]:
    fault, throttled = "ZeroTrainGpuFault", "ZeroTrainGpuThrottled"
    every = [
        part
        for rank, xid in enumerate(XIDS)
        for part in (
            on_gpu(rank, rank, 180),
            dcgm("DCGM_FI_DEV_XID_ERRORS", rank, [*flat(0, 20), *flat(float(xid), 160)]),
        )
    ]
    return (
        Case(
            alert=fault,
            name="every Xid that ends the work, on a GPU of its own, for an hour",
            series=merged(*every),
            fires=tuple(
                Firing(
                    labels=under(rank, rank, xid=str(xid), fault=f"xid {xid}"),
                    severity="critical",
                    from_s=600,
                    until_s=4170,
                )
                for rank, xid in enumerate(XIDS)
            ),
        ),
        Case(
            alert=fault,
            name="an Xid of a user's program, one of last week, and one of a GPU that no job has",
            series=merged(
                on_gpu(0, 0, 60),
                on_gpu(1, 1, 60),
                dcgm("DCGM_FI_DEV_XID_ERRORS", 0, [*flat(0, 20), *flat(31, 40)]),
                dcgm("DCGM_FI_DEV_XID_ERRORS", 1, flat(79, 60)),
                dcgm("DCGM_FI_DEV_XID_ERRORS", 2, [*flat(0, 20), *flat(79, 40)]),
            ),
            quiet_at_s=(600, 630, 900, 1700),
        ),
        Case(
            alert=fault,
            name="a faulty GPU, beside a pod of somebody else that names GPUs in two ways",
            series=merged(
                on_gpu(0, 7, 60),
                *(
                    {
                        series("zerotrain_rank_info", namespace="other", UUID=uuid, gpu_uuid="GPU-0"): flat(
                            1, 60
                        )
                    }
                    for uuid in ("a", "b")
                ),
                dcgm("DCGM_FI_DEV_ROW_REMAP_FAILURE", 7, pulse(20, 1, 40)),
            ),
            fires=(Firing(labels=under(0, 7, fault="row remap"), severity="critical", from_s=600),),
        ),
        Case(
            alert=fault,
            name="uncorrectable memory errors and a failed row remap, while two attempts overlap",
            series=merged(
                on_gpu(0, 0, 180),
                {
                    series("zerotrain_rank_info", job_name="old", rank="0", gpu_uuid="GPU-0"): flat(1, 3),
                },
                on_gpu(1, 1, 180),
                dcgm("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 0, pulse(20, 1, 160)),
                dcgm("DCGM_FI_DEV_ROW_REMAP_FAILURE", 0, flat(0, 180)),
                dcgm("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 1, flat(5, 180)),
                dcgm("DCGM_FI_DEV_ROW_REMAP_FAILURE", 1, pulse(20, 1, 160)),
            ),
            fires=(
                Firing(labels=under(0, 0, fault="ecc"), severity="critical", from_s=600, until_s=4170),
                Firing(labels=under(1, 1, fault="row remap"), severity="critical", from_s=600),
            ),
        ),
        *(
            Case(
                alert=throttled,
                name=f"{name}, beside idle and capped GPUs",
                series=merged(
                    *(on_gpu(rank, rank, 60) for rank in range(len(HARMLESS) + 1)),
                    # Always with bit 0x4 (software power cap), which every busy GPU shows.
                    dcgm(
                        "DCGM_FI_DEV_CLOCKS_EVENT_REASONS",
                        0,
                        [*flat(4, 10), *flat(4.0 + bit, 30), *flat(4, 20)],
                    ),
                    *(
                        dcgm("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", gpu, flat(float(reasons), 60))
                        for gpu, reasons in enumerate(HARMLESS, start=1)
                    ),
                ),
                fires=(Firing(labels=under(0, 0), from_s=900, until_s=1200),),
            )
            for bit, name in REASONS.items()
        ),
    )


CASES = (*numerics(), *checkpoints(), *spill(), *memory(), *gpus())
