"""Values at a moment of what is recorded without an alert, and of what panels join."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.monitoring.rules.model import Training, Value, flat, merged, notation, ramp, series


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """Series, and all that one query finds in them at some moments."""

    name: str
    rule: str = ""
    """The recording rule under test; empty for a query on plain series."""
    expr: str = ""
    """The PromQL expression; empty to query the rule's own name."""
    series: Mapping[str, Sequence[Value]]
    finds: Mapping[int, Mapping[str, float]]
    """Moment in seconds -> series without the name -> value; empty where the query returns nothing."""
    interval_s: int = 30

    def document(self, rule_file: str) -> str:
        """Return the promtool test file; JSON, which is YAML."""
        checks = [
            {
                "expr": self.expr or self.rule,
                "eval_time": f"{moment}s",
                "exp_samples": [
                    {"labels": labels if self.expr else self.rule + labels, "value": value}
                    for labels, value in found.items()
                ],
            }
            for moment, found in self.finds.items()
        ]
        input_series = [{"series": name, "values": notation(values)} for name, values in self.series.items()]
        interval = f"{self.interval_s}s"
        test = {"interval": interval, "input_series": input_series, "promql_expr_test": checks}
        return json.dumps(
            {
                "rule_files": [rule_file],
                "evaluation_interval": interval,
                "fuzzy_compare": True,  # in the last bits
                "tests": [test],
            }
        )


COUNT, BEND = 60, 40
"""Number of samples, and the sample from which counters grow at another pace, so that a window of another
length has another mean.
"""
MIDST_S, END_S = (BEND - 1 + 5) * 30, (COUNT - 1) * 30
"""Moments at which five, and then all, of the nine steps between samples in a five-minute window are behind
the bend.
"""
OLD, NEW = 4, 5
TEAM = Training(ranks=2)
JOB = '{namespace="ml",job_name="gpt"}'


def bent(slow: float, fast: float) -> list[Value]:
    """Return a counter that grows by `slow` and, in the last ten minutes, by `fast` for each sample."""
    return [*ramp(0, slow, BEND), *ramp((BEND - 1) * slow + fast, fast, COUNT - BEND)]


def ranks(
    metric: str, first: Sequence[Value], second: Sequence[Value], **labels: str
) -> dict[str, list[Value]]:
    """Return a metric whose samples differ between the two ranks."""
    return merged(  # type: ignore[return-value]
        TEAM.of_rank(0, metric, first, **labels), TEAM.of_rank(1, metric, second, **labels)
    )


def mean_of(metric: str, recorded: str) -> Values:
    """Case of a mean over five minutes.

    A sample counts ten events in 30 s at first, then five in 20 s: 4 s each in the newest five minutes, and
    less in a longer window.
    """
    still = TEAM.of_ranks(f"{metric}_count", flat(7, COUNT)) | TEAM.of_ranks(f"{metric}_sum", flat(7, COUNT))
    return Values(
        name=f"{recorded}: the mean of five minutes, nothing of a job that stands",
        rule=recorded,
        series=merged(
            TEAM.of_ranks(f"{metric}_sum", bent(30, 20)),
            TEAM.of_ranks(f"{metric}_count", bent(10, 5)),
            {name.replace('"gpt', '"still'): values for name, values in still.items()},
        ),
        finds={
            300: {JOB: 3.0},
            MIDST_S: {JOB: (OLD * 30 + NEW * 20) / (OLD * 10 + NEW * 5)},
            END_S: {JOB: 4.0},
        },
    )


def rate_of(metric: str, recorded: str, **labels: str) -> Values:
    """Case of a rate summed over both ranks; with labels, series of the other direction are left out."""
    other = {"direction": "spill_read"} if labels else None
    return Values(
        name=f"{recorded}: the rate of five minutes, of all ranks",
        rule=recorded,
        series=merged(
            ranks(metric, bent(60, 30), bent(120, 60), **labels),
            {} if other is None else TEAM.of_ranks(metric, bent(999, 999), **other),
        ),
        finds={300: {JOB: 6.0}, MIDST_S: {JOB: (OLD * 6.0 + NEW * 3.0) / (OLD + NEW)}, END_S: {JOB: 3.0}},
    )


def last_of(metric: str, recorded: str) -> Values:
    """Case of a value that is taken from rank 0 alone."""
    return Values(
        name=f"{recorded}: as rank 0 tells it",
        rule=recorded,
        series=ranks(metric, ramp(0, 0.5, COUNT), flat(1e6, COUNT)),
        finds={300: {JOB: 5.0}, END_S: {JOB: (COUNT - 1) / 2}},
    )


def buckets_of(op: str, recorded: str) -> Values:
    """Case of bucket counters that keep each target's own series of this operation, without the label
    `op`.
    """
    name = "zerotrain_collective_duration_seconds_bucket"
    values = {le: ramp(0, growth, COUNT) for le, growth in (("0.5", 90), ("+Inf", 100))}
    parts = [TEAM.of_ranks(name, each, op=op, le=le) for le, each in values.items()]
    others = [TEAM.of_ranks(name, flat(7, COUNT), op="record", le=le) for le in values]
    found = {
        series("", **TEAM.labels(rank), le=le): float(growth * (COUNT - 1))
        for rank in range(2)
        for le, growth in (("0.5", 90), ("+Inf", 100))
    }
    return Values(
        name=f"{recorded}: counters by target and bound",
        rule=recorded,
        series=merged(*parts, *others),
        finds={END_S: found},
    )


def peaks() -> Values:
    """Case of the peak of the fullest rank in each phase, over GPU memory alone."""
    name = "zerotrain_memory_peak_bytes"
    return Values(
        name="deepspeed:gpu_memory_peak_bytes: of the fullest rank, by phase",
        rule="deepspeed:gpu_memory_peak_bytes",
        series=merged(
            ranks(name, flat(5e9, COUNT), flat(7e9, COUNT), tier="gpu", phase="forward"),
            ranks(name, flat(9e9, COUNT), flat(8e9, COUNT), tier="gpu", phase="step"),
            ranks(name, flat(6e10, COUNT), flat(6e10, COUNT), tier="pinned", phase="step"),
        ),
        finds={
            END_S: {
                '{namespace="ml",job_name="gpt",phase="forward"}': 7e9,
                '{namespace="ml",job_name="gpt",phase="step"}': 9e9,
            }
        },
    )


def young(name: str, step_s: float, *, begins_s: int, baseline_s: int) -> Values:
    """Case of a young job: its mean exists from its fifth step on, its baseline by the next five minutes of
    the clock.
    """
    kind = "namespace_job_name_world_size:zerotrain_step_duration_seconds"
    return Values(
        name=name,
        rule=f"{kind}:best1d",
        expr=f"count by (__name__) ({{__name__=~'{kind}:(mean15m|best1d)'}})",
        series=Training(ranks=2).train(60, step_s).series(),
        finds={
            begins_s - 30: {},
            begins_s: {f"{kind}:mean15m": 1},
            baseline_s - 30: {f"{kind}:mean15m": 1},
            baseline_s: {f"{kind}:mean15m": 1, f"{kind}:best1d": 1},
        },
    )


RECORDED = (
    mean_of("zerotrain_step_duration_seconds", "deepspeed:step_time_seconds"),
    mean_of("zerotrain_optimizer_step_duration_seconds", "deepspeed:optimizer_step_seconds"),
    buckets_of("all_gather", "deepspeed:allgather_seconds_bucket"),
    buckets_of("reduce_scatter", "deepspeed:reducescatter_seconds_bucket"),
    last_of("zerotrain_grad_norm", "deepspeed:grad_norm"),
    last_of("zerotrain_loss", "deepspeed:loss"),
    last_of("zerotrain_loss_scale", "deepspeed:loss_scale"),
    rate_of("zerotrain_tokens_total", "namespace_job_name:zerotrain_tokens:rate5m"),
    rate_of("zerotrain_samples_total", "deepspeed:samples_per_second"),
    rate_of("zerotrain_transfer_bytes_total", "deepspeed:host_to_device_bytes_per_second", direction="h2d"),
    rate_of("zerotrain_transfer_bytes_total", "deepspeed:device_to_host_bytes_per_second", direction="d2h"),
    peaks(),
    young("steps of ten seconds", 10.0, begins_s=60, baseline_s=300),
    young("steps of more than a minute", 70.0, begins_s=360, baseline_s=600),
)
"""Cases of the recording rules that no alert uses, and of one more that a page promises."""
