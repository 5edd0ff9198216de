"""Notation for the unit tests of rules, and its translation into files that promtool runs.

A case is a set of series and the times between which an alert fires. promtool is asked at the last moment of
silence and at the first moment of alarm, at both ends, so that a threshold or a `for` that moves is seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Value = float | None
"""A sample; None where the scrape brought none."""

NAN = float("nan")
NAMESPACE = "ml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Firing:
    """One alert of a case, with the labels that it must have and no others."""

    labels: Mapping[str, str]
    from_s: int
    """First evaluation at which the alert fires."""
    until_s: int | None = None
    """First evaluation at which the alert no longer fires; None where the case ends before."""
    severity: str = "warning"

    def at(self, time_s: int) -> bool:
        return self.from_s <= time_s and (self.until_s is None or time_s < self.until_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One sequence of events as series, and the alerts that must follow from it."""

    alert: str
    name: str
    series: Mapping[str, Sequence[Value]]
    """Series with labels -> samples, one per interval."""
    fires: tuple[Firing, ...] = ()
    quiet_at_s: tuple[int, ...] = ()
    """Further evaluations at which nothing but `fires` may fire."""
    interval_s: int = 30

    @property
    def moments_s(self) -> tuple[int, ...]:
        """Moments, in seconds, at which promtool evaluates the case."""
        moments = set(self.quiet_at_s)
        for firing in self.fires:
            moments |= {firing.from_s - self.interval_s, firing.from_s}
            if firing.until_s is not None:
                moments |= {firing.until_s - self.interval_s, firing.until_s}
        return tuple(sorted(moments))

    def document(self, rule_file: str) -> str:
        """Return the promtool test file; JSON, which is YAML."""
        checks = [
            {
                "expr": f'ALERTS{{alertname="{self.alert}",alertstate="firing"}}',
                "eval_time": f"{moment}s",
                "exp_samples": [
                    {"labels": _alert_labels(self.alert, firing), "value": 1}
                    for firing in self.fires
                    if firing.at(moment)
                ],
            }
            for moment in self.moments_s
        ]
        test = {
            "interval": f"{self.interval_s}s",
            "input_series": [
                {"series": series, "values": notation(values)} for series, values in self.series.items()
            ],
            "promql_expr_test": checks,
        }
        return json.dumps(
            {
                "rule_files": [rule_file],
                "evaluation_interval": f"{self.interval_s}s",
                "tests": [test],
            }
        )


def notation(values: Sequence[Value]) -> str:
    """Return the samples in promtool's notation, with runs of equal ones folded."""
    words: list[str] = []
    start = 0
    while start < len(values):
        end = start
        while end + 1 < len(values) and _word(values[end + 1]) == _word(values[start]):
            end += 1
        word, repeats = _word(values[start]), end - start
        if word in ("NaN",) or repeats == 0:
            words += [word] * (repeats + 1)  # NaN cannot be folded
        else:
            words.append(f"_x{repeats + 1}" if word == "_" else f"{word}x{repeats}")
        start = end + 1
    return " ".join(words)


def _word(value: Value) -> str:
    if value is None:
        return "_"
    return "NaN" if value != value else repr(round(value, 6)).removesuffix(".0")


def _alert_labels(alert: str, firing: Firing) -> str:
    labels = {"alertname": alert, "alertstate": "firing", "severity": firing.severity, **firing.labels}
    return "ALERTS{" + ",".join(f"{name}={json.dumps(value)}" for name, value in sorted(labels.items())) + "}"


def series(metric: str, **labels: str) -> str:
    """Return `metric{...}`, in the namespace of all cases unless `namespace` is given."""
    labels = {"namespace": NAMESPACE, **labels}
    return metric + "{" + ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items()) + "}"


def flat(value: Value, count: int) -> list[Value]:
    return [value] * count


def ramp(start: float, step: float, count: int) -> list[Value]:
    return [start + step * index for index in range(count)]


def pulse(before: int, height: float, after: int) -> list[Value]:
    """Return a counter that is 0, then rises once."""
    return [*flat(0, before), *flat(height, after)]


@dataclass(kw_only=True)
class Training:
    """The counters of one job's ranks while it trains at changing paces."""

    job: str = "gpt"
    ranks: int = 2
    interval_s: int = 30
    attempt: int = 1
    begin: int = 0
    """Index of the first sample: there is no such series before."""
    sums: list[Value] = field(default_factory=lambda: [0.0])
    counts: list[Value] = field(default_factory=lambda: [0.0])
    last_step_s: list[Value] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last_step_s.append(float(self.begin * self.interval_s))

    def train(self, intervals: int, step_s: float) -> Training:
        """Train for `intervals` intervals, in steps of `step_s` seconds."""
        for _ in range(intervals):
            self.sums.append(_last(self.sums) + self.interval_s)
            self.counts.append(_last(self.counts) + self.interval_s / step_s)
            self.last_step_s.append(self._now_s())
        return self

    def steps(self, count: int, step_s: float) -> Training:
        """Train `count` whole steps, each exported when it ends, as real ranks do."""
        for _ in range(count):
            self.hang(round(step_s / self.interval_s) - 1)
            self.sums.append(_last(self.sums) + step_s)
            self.counts.append(_last(self.counts) + 1)
            self.last_step_s.append(self._now_s())
        return self

    def hang(self, intervals: int) -> Training:
        """Add `intervals` samples in which no counter moves."""
        for _ in range(intervals):
            for values in (self.sums, self.counts, self.last_step_s):
                values.append(values[-1])
        return self

    def series(self) -> dict[str, list[Value]]:
        """Return step histogram (sum and count), time of the last step and info of every rank."""
        found: dict[str, list[Value]] = {}
        for rank in range(self.ranks):
            labels = self.labels(rank)
            for metric, values in (
                ("zerotrain_step_duration_seconds_sum", self.sums),
                ("zerotrain_step_duration_seconds_count", self.counts),
                ("zerotrain_last_step_timestamp_seconds", self.last_step_s),
            ):
                found[series(metric, **labels)] = [*flat(None, self.begin), *values]
            # The counters begin at 0, as everything that a rank exports.
            for metric in ("sum", "count"):
                name = f"zerotrain_checkpoint_duration_seconds_{metric}"
                found[series(name, **labels, operation="save")] = flat(0, self.begin + len(self.sums))
            info = {**labels, "world_size": str(self.ranks), "attempt": str(self.attempt)}
            found[series("zerotrain_rank_info", **info)] = [
                *flat(None, self.begin),
                *flat(1, len(self.sums)),
            ]
        return found

    def labels(self, rank: int) -> dict[str, str]:
        """Return the labels of a rank's series."""
        pod = f"{self.job}-{self.attempt}-{rank}"
        return {"job_name": self.job, "rank": str(rank), "pod": pod, "node": f"node-{self.attempt}-{rank}"}

    def of_ranks(self, metric: str, values: Sequence[Value], **more: str) -> dict[str, list[Value]]:
        """Return the same samples for every rank, from this attempt's beginning."""
        samples = [*flat(None, self.begin), *values]
        return {series(metric, **self.labels(rank), **more): samples for rank in range(self.ranks)}

    def of_rank(self, rank: int, metric: str, values: Sequence[Value], **more: str) -> dict[str, list[Value]]:
        """Return the samples of one rank."""
        return {series(metric, **self.labels(rank), **more): [*flat(None, self.begin), *values]}

    def _now_s(self) -> float:
        return (self.begin + len(self.sums) - 1) * float(self.interval_s)


def merged(*parts: Mapping[str, Sequence[Value]]) -> dict[str, Sequence[Value]]:
    """Return all series together. Raises ValueError for a series that is given twice."""
    found: dict[str, Sequence[Value]] = {}
    for part in parts:
        twice = found.keys() & part.keys()
        if twice:
            raise ValueError(f"series given twice: {sorted(twice)}")
        found |= part
    return found


def by_alert(cases: Iterable[Case]) -> dict[str, tuple[Case, ...]]:
    """Return the cases of every alert."""
    found: dict[str, tuple[Case, ...]] = {}
    for case in cases:
        found[case.alert] = (*found.get(case.alert, ()), case)
    return found


def _last(values: Sequence[Value]) -> float:
    value = values[-1]
    if value is None:
        raise ValueError("the last sample is missing")
    return value
