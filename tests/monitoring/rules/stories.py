"""Sequences of events in jobs, as series for the common rules and for ours at once.

The common rules read gauges by rank and pod (`deepspeed:*`), as an exporter beside DeepSpeed would derive
from its log; ours read what workers export. Both are made from the same story.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.monitoring.rules.model import NAN, Training, Value, flat, merged, notation, pulse, ramp, series

INTERVAL_S = 60
"""Interval of scrapes and of evaluations, as in the common rules."""

HUNG = 0.0
"""Step time that stands for a hang: no step ends any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Number of alerts of each name that have fired so far, or that fire at this moment."""

    at_min: int
    common: Mapping[str, int] = field(default_factory=dict)
    ours: Mapping[str, int] = field(default_factory=dict)
    so_far: bool = True

    def checks(self) -> list[dict[str, object]]:
        """Return promtool's checks: one on the common rules, one on ours."""
        return [self._check("Common", self.common), self._check("ZeroTrain", self.ours)]

    def _check(self, prefix: str, expected: Mapping[str, int]) -> dict[str, object]:
        alerts = f'ALERTS{{alertname=~"{prefix}.+",alertstate="firing"}}'
        seen = f"count_over_time({alerts}[1d])" if self.so_far else alerts
        return {
            "expr": f"count by (alertname) ({seen})",
            "eval_time": f"{self.at_min}m",
            "exp_samples": [
                {"labels": f'{{alertname="{prefix}{name}"}}', "value": count}
                for name, count in expected.items()
            ],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """One row of the table in docs/alerts.md, or a story that the common rules do find."""

    name: str
    """Title of the row in the table."""
    series: Mapping[str, Sequence[Value]]
    looks: tuple[Look, ...]

    def document(self, rule_file: str) -> str:
        """Return the promtool test file; JSON, which is YAML."""
        samples = max(len(values) for values in self.series.values())
        operator = {series("zerotrain_operator_leader", namespace="zerotrain", pod="op-0"): flat(1, samples)}
        input_series = [
            {"series": name, "values": notation(values)}
            for name, values in merged(self.series, operator).items()
        ]
        checks = [check for look in self.looks for check in look.checks()]
        test = {"interval": f"{INTERVAL_S}s", "input_series": input_series, "promql_expr_test": checks}
        return json.dumps(
            {"rule_files": [rule_file], "evaluation_interval": f"{INTERVAL_S}s", "tests": [test]}
        )


def step_series(
    *stretches: tuple[int, float],
    ranks: int = 2,
    attempt: int = 1,
    begin: int = 0,
    grad_norm: Sequence[Value] = (),
    counted: Mapping[str, Sequence[Value]] | None = None,
) -> dict[str, Sequence[Value]]:
    """Return the series of one attempt: minutes at a step time, then minutes at another.

    The gauges keep the last step's value. `counted` are further counters of all ranks.
    """
    team = Training(ranks=ranks, attempt=attempt, begin=begin, interval_s=INTERVAL_S)
    step_time: list[Value] = [stretches[0][1]]
    for minutes, step_s in stretches:
        step_time += flat(step_s or step_time[-1], minutes)
        if step_s == HUNG:
            team.hang(minutes)
        else:
            team.train(minutes, step_s)
    norm = grad_norm or flat(1.0, len(step_time))
    counters = {name: flat(0, len(step_time)) for name in COUNTERS} | dict(counted or {})
    return merged(
        team.series(),
        team.of_ranks("deepspeed:step_time_seconds", step_time),
        team.of_ranks("deepspeed:grad_norm", norm),
        team.of_ranks("zerotrain_grad_norm", norm),
        *(team.of_ranks(name, values) for name, values in counters.items()),
    )


COUNTERS = ("zerotrain_grad_norm_spikes_total", "zerotrain_nonfinite_steps_total")
"""Counters that begin at 0, as everything that a rank exports."""


def numerics() -> tuple[Story, ...]:
    spike = [*flat(1.0, 95), 100.0, *flat(1.0, 30)]
    broken = [*flat(1.0, 95), *flat(NAN, 31)]
    return (
        Story(
            name="the gradient norm spikes for one step",
            series=step_series(
                (125, 1.0),
                grad_norm=spike,
                counted={"zerotrain_grad_norm_spikes_total": pulse(95, 1, 31)},
            ),
            looks=(Look(at_min=125, ours={"GradNormSpike": 1}),),
        ),
        Story(
            name="the norm is NaN",
            series=step_series(
                (125, 1.0),
                grad_norm=broken,
                counted={"zerotrain_nonfinite_steps_total": [*flat(0, 95), *ramp(60, 60, 31)]},
            ),
            looks=(Look(at_min=125, ours={"NonFinite": 1}),),
        ),
    )


def pace() -> tuple[Story, ...]:
    slower = {"StepTimeRegression": 1}
    return (
        Story(
            name="the job hangs",
            series=step_series((95, 1.0), (60, HUNG)),
            looks=(Look(at_min=155, ours={"JobStalled": 1}),),
        ),
        Story(
            name="it is slower from its tenth minute on",
            series=step_series((10, 1.0), (50, 1.5)),
            looks=(
                Look(at_min=30, ours=slower),
                Look(at_min=39, ours=slower),
                Look(at_min=60, ours=slower, common={"StepTime": 2}),
            ),
        ),
        Story(
            name="it slows down and stays slow",
            series=step_series((95, 1.0), (120, 1.25)),
            looks=(
                Look(at_min=135, common={"StepTime": 2}, ours=slower, so_far=False),
                Look(at_min=175, ours=slower, so_far=False),
                Look(at_min=215, ours=slower, so_far=False),
            ),
        ),
        Story(
            name="a restart lands on a slower node",
            series=merged(step_series((95, 1.0)), step_series((100, 1.3), attempt=2, begin=100)),
            looks=(Look(at_min=200, ours=slower),),
        ),
    )


def shares() -> tuple[Story, ...]:
    ranks, minutes = 8, 60
    team = Training(ranks=ranks, interval_s=INTERVAL_S)
    gathers: list[dict[str, list[Value]]] = []
    for bound, count in (("0.5", 90), ("1.0", 90), ("5.0", 100), ("+Inf", 100)):
        counts = ramp(0, count, minutes + 1)
        gathers += (
            team.of_ranks("deepspeed:allgather_seconds_bucket", counts, le=bound),
            team.of_ranks("zerotrain_collective_duration_seconds_bucket", counts, le=bound, op="all_gather"),
        )
    exposed = ramp(0, INTERVAL_S * 4 / 5, minutes + 1)
    return (
        Story(
            name="an all-gather is slow on 8 ranks",
            series=merged(step_series((minutes, 1.0), ranks=ranks), *gathers),
            looks=(Look(at_min=minutes, common={"AllGather": ranks}, ours={"AllGatherP99": 1}),),
        ),
        Story(
            name="the optimizer takes 4 s of a step of 5 s",
            series=merged(
                step_series((minutes, 5.0)),
                Training().of_ranks("deepspeed:optimizer_step_seconds", flat(4.0, minutes + 1)),
                Training().of_ranks("zerotrain_optimizer_exposed_seconds_total", exposed),
            ),
            looks=(Look(at_min=minutes, ours={"OptimizerShareHigh": 1}),),
        ),
    )


STORIES = (*numerics(), *pace(), *shares())

FOUND_BY_ALL = (
    Story(
        name="a hundred times the gradient norm, for ten minutes",
        series=step_series(
            (125, 1.0),
            grad_norm=[*flat(1.0, 95), *flat(100.0, 10), *flat(1.0, 21)],
            counted={"zerotrain_grad_norm_spikes_total": [*flat(0, 95), *ramp(1, 1, 10), *flat(10, 21)]},
        ),
        looks=(Look(at_min=125, common={"GradNorm": 2}, ours={"GradNormSpike": 1}),),
    ),
    Story(
        name="an optimizer step of six seconds",
        series=merged(
            step_series((60, 7.0)),
            Training().of_ranks("deepspeed:optimizer_step_seconds", flat(6.0, 61)),
            Training().of_ranks("zerotrain_optimizer_exposed_seconds_total", ramp(0, 50, 61)),
        ),
        looks=(Look(at_min=60, common={"OptimizerStep": 2}, ours={"OptimizerShareHigh": 1}),),
    ),
)
"""Stories that the common rules find: they prove that their silence above is not that of a misspelt name."""
