"""The operator's scrape stays below its limit however many jobs a tenant makes, and other tenants keep their
series.
"""

from __future__ import annotations

import random
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from ruamel.yaml import YAML

from tests.operator.cluster.test_metrics import STATUS
from zerotrain.contract.metrics.operator import JOB_PHASES
from zerotrain.contract.metrics.sizing import (
    MAX_EXPORTED_JOBS,
    MAX_EXPORTED_JOBS_OF_NAMESPACE,
    MAX_NAMED_NAMESPACES,
    OPERATOR_SCRAPE_LIMIT,
    OWN_OPERATOR_SAMPLES,
    samples_of_a_job,
    samples_of_the_operator,
)
from zerotrain.operator.cluster.job_metrics import JobCollector, choose, values_of
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.cluster.telemetry import Telemetry

pytestmark = pytest.mark.unit

Json = dict[str, Any]
Job = tuple[JobKey, Json]


def a_job(namespace: str, number: int, phase: str = "Running", **status: Any) -> Job:
    created = f"2026-01-01T{number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02}Z"
    body = {
        "metadata": {"uid": f"{namespace}-{number}", "resourceVersion": "1", "creationTimestamp": created},
        "spec": {"scheduling": {"queueName": "research"}},
        "status": {"phase": phase, **status},
    }
    return JobKey(namespace, f"job-{number:06}"), body


def in_namespaces(**sizes: int) -> list[Job]:
    return [a_job(name, number) for name, size in sizes.items() for number in range(size)]


def kept_by_namespace(jobs: list[Job], **bounds: int) -> Counter[str]:
    return Counter(key.namespace for key, _ in choose(jobs, **bounds).jobs)


def test_all_are_kept_where_they_fit() -> None:
    jobs = in_namespaces(a=5, b=3)
    assert list(choose(jobs, overall=8, of_namespace=5).jobs) == jobs
    assert choose(jobs, overall=8, of_namespace=5).left_out == {}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"a": 100, "b": 3}, {"a": 7, "b": 3}),
        ({"a": 100, "b": 100, "c": 1}, {"a": 4, "b": 4, "c": 1}),
        ({"a": 100, "b": 4, "c": 1}, {"a": 5, "b": 4, "c": 1}),
        ({"a": 9}, {"a": 8}),
    ],
)
def test_one_namespace_takes_nothing_from_the_others(sizes: dict[str, int], expected: dict[str, int]) -> None:
    assert kept_by_namespace(in_namespaces(**sizes), overall=10, of_namespace=8) == expected


@pytest.mark.parametrize("seed", range(50))
def test_the_bounds_hold_and_the_rest_is_counted(seed: int) -> None:
    chance = random.Random(seed)
    jobs = [
        a_job(f"n{chance.randrange(12)}", number, chance.choice([*JOB_PHASES, "Forged"]))
        for number in range(chance.randrange(300))
    ]
    overall, of_namespace = chance.randrange(1, 100), chance.randrange(1, 40)
    chosen = choose(jobs, overall=overall, of_namespace=of_namespace)
    kept = Counter(key.namespace for key, _ in chosen.jobs)
    assert len(chosen.jobs) <= overall
    assert max(kept.values(), default=0) <= of_namespace
    assert len(chosen.jobs) + sum(chosen.left_out.values()) == len(jobs)
    # No namespace keeps more than one that had to leave series out.
    left = {namespace for namespace, _ in chosen.left_out}
    assert all(kept[namespace] == max(kept.values()) for namespace in left - {""} if kept)


def test_ended_and_idle_jobs_go_first_the_oldest_before_the_others() -> None:
    phases = ["Completed", "Running", "Failed", "Suspended", "Starting", "Failed", "Stalled", "Queued"]
    jobs = [a_job("a", number, phase) for number, phase in enumerate(phases)]

    def kept(count: int) -> list[str]:
        return sorted(key.name for key, _ in choose(jobs, of_namespace=count).jobs)

    order = [7, 4, 1, 6, 3, 5, 2, 0]  # the last to go first
    for count in range(1, 9):
        assert kept(count) == sorted(f"job-{number:06}" for number in order[:count])


def test_namespaces_that_are_named_are_bounded() -> None:
    jobs = [a_job(f"n{number:05}", job) for number in range(MAX_NAMED_NAMESPACES + 50) for job in range(2)]
    left = choose(jobs, of_namespace=1).left_out
    assert len({namespace for namespace, _ in left}) == MAX_NAMED_NAMESPACES + 1
    assert left["", "Running"] == 50


def test_a_job_has_no_more_series_than_are_counted_for_it() -> None:
    failures = [
        {
            "time": "2026-01-31T10:50:00Z",
            "reason": f"R{number}",
            "exitCode": number,
            "message": "CommError: x",
        }
        for number in range(500)
    ]
    _, body = a_job("a", 1, **{**deepcopy(STATUS), "failures": failures})
    body["status"]["completionTime"] = "2026-01-31T11:50:00Z"
    body["status"]["memoryPlan"]["pinnedBytes"] = 1
    assert len(list(values_of(body))) == samples_of_a_job()


def test_the_worst_scrape_stays_below_the_limit_of_the_chart() -> None:
    chart = Path(__file__).parents[3] / "charts/zerotrain/values.yaml"
    values = YAML(typ="safe", pure=True).load(chart.read_text())
    assert values["serviceMonitor"]["sampleLimit"] == OPERATOR_SCRAPE_LIMIT
    assert samples_of_the_operator() < OPERATOR_SCRAPE_LIMIT
    assert MAX_EXPORTED_JOBS_OF_NAMESPACE < MAX_EXPORTED_JOBS


def test_a_scrape_shows_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "__kwdefaults__", {"overall": 10, "of_namespace": 8})
    jobs = in_namespaces(hog=30, small=2)
    telemetry = Telemetry()
    telemetry.watch_jobs(JobCollector(jobs, lambda: True))
    text = generate_latest(telemetry.registry).decode()
    assert 'zerotrain_operator_jobs_without_series{job_namespace="hog",phase="Running"} 22.0' in text
    named = {line.split('namespace="')[1].split('"')[0] for line in text.splitlines() if "job_step{" in line}
    assert named == {"hog", "small"}
    assert text.count("zerotrain_job_step{") == 10
    assert 'queue="research"' in text
    own = [line for line in text.splitlines() if line and line[0] != "#" and "zerotrain_job_" not in line]
    assert len(own) < OWN_OPERATOR_SAMPLES / 10
