"""Metrics of the operator: its own, which start at 0, and those of every job, from its status."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.operator.reconcile_builders import job
from tests.support.metric_names import exported
from tests.support.tools import run_program
from zerotrain.contract.metrics import JOB_METRICS, OPERATOR_METRICS, MetricKind
from zerotrain.contract.metrics.operator import RESTART_CAUSES
from zerotrain.operator.cluster.job_metrics import JobCollector
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.cluster.telemetry import Telemetry
from zerotrain.operator.controller.work_queue import WorkQueue

KEY = JobKey("ml", "gpt")
Json = dict[str, Any]

STATUS: Json = {
    "phase": "Running",
    "attempt": 3,
    "zeroStage": 3,
    "startTime": "2026-01-31T10:00:00Z",
    "attemptStartTime": "2026-01-31T11:00:00Z",
    "workers": {"desired": 4, "running": 4, "ready": 3},
    "ranks": {"desired": 8, "running": 8, "ready": 6},
    "restarts": {"app": 1, "infra": 2, "total": 3},
    "progress": {"step": 120, "totalSteps": 1000, "lastStepTime": "2026-01-31T11:30:00.5Z"},
    "checkpoint": {
        "last": {"step": 100, "time": "2026-01-31T11:20:00Z"},
        "verification": {"state": "Damaged", "step": 100, "startTime": "2026-01-31T11:21:00Z"},
    },
    "hang": {"attempt": 3, "detectedAt": "2026-01-31T11:40:00Z"},
    "straggler": {"attempt": 3, "rank": 5, "percent": 180},
    "failures": [
        {
            "attempt": 2,
            "time": "2026-01-31T10:50:00Z",
            "reason": "SpillIntegrity",
            "exitCode": 84,
            "message": "exit code 84 (the spill): SpillIntegrityError: unit 'h.1'",
        },
        {"attempt": 1, "time": "2026-01-31T10:20:00Z", "reason": "NodeLost", "message": "MyError: secret"},
    ],
    "memoryPlan": {"verdict": "Fits", "gpuBytes": 10, "hostBytes": 20, "nvmeBytes": 30},
    "conditions": [
        {"type": "PodsScheduled", "status": "True", "lastTransitionTime": "2026-01-31T11:00:30Z"},
        {"type": "Progressing", "status": "True", "lastTransitionTime": "2026-01-31T11:02:00Z"},
    ],
}


def unix(text: str) -> float:
    return datetime.strptime(text, "%H:%M:%S").replace(year=2026, month=1, day=31, tzinfo=UTC).timestamp()


def telemetry(jobs: list[tuple[JobKey, Json]], *, leads: bool = True) -> Telemetry:
    found = Telemetry()
    found.watch_jobs(JobCollector(jobs, lambda: leads))
    return found


def with_status(**status: Any) -> Json:
    body = job(resourceVersion="1")
    body["spec"]["scheduling"] = {"queueName": "research"}
    body["spec"]["hangPolicy"] = {"startupTimeoutSeconds": 7200}
    body["metadata"]["creationTimestamp"] = "2026-01-31T09:00:00Z"
    return body | {"status": STATUS | status}


def value(source: Telemetry, name: str, **labels: str) -> float | None:
    return source.registry.get_sample_value(name, {"namespace": "ml", "job_name": "gpt"} | labels)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("policy", "step_s", "limit_s"),
    [
        ({"stepTimeoutFactor": 40}, 60.0, 2400),
        ({"stepTimeoutFactor": 40, "minTimeoutSeconds": 3600}, 60.0, 3600),
        ({"stepTimeoutFactor": 1000}, 86_400.0, 30 * 86_400),
        # The limits already contain ten times the mean, and one long step is no reason to wait for long.
        ({"stepTimeoutFactor": 10}, 60.0, 300),
        ({"stepTimeoutFactor": 40}, None, 300),
    ],
)
def test_a_patient_hang_policy_is_exported_with_the_time_of_the_last_step(
    policy: Json, step_s: float | None, limit_s: float
) -> None:
    body = with_status(progress={"attempt": 3, "step": 120, "stepSeconds": step_s})
    body["spec"]["hangPolicy"] = policy
    assert value(telemetry([(KEY, body)]), "zerotrain_job_hang_limit_seconds", phase="step") == limit_s


@pytest.mark.unit
def test_a_jobs_status_as_series() -> None:
    found = telemetry([(KEY, with_status())])
    expected: dict[tuple[str, ...], float | None] = {
        ("info", "zero_stage=3", "queue=research"): 1,
        ("phase", "phase=Running"): 1,
        ("phase", "phase=Pending"): None,
        ("phase_since_timestamp_seconds",): unix("11:02:00"),
        ("created_timestamp_seconds",): unix("09:00:00"),
        ("start_timestamp_seconds",): unix("10:00:00"),
        ("completion_timestamp_seconds",): None,
        ("attempt",): 3,
        ("attempt_start_timestamp_seconds",): unix("11:00:00"),
        ("workers",): 4,
        ("workers_ready",): 3,
        ("ranks",): 8,
        ("ranks_ready",): 6,
        ("restarts_total", "cause=infra"): 2,
        ("restarts_total", "cause=preemption"): 0,
        ("restarts_total", "cause=uncharged"): 0,
        ("step",): 120,
        ("total_steps",): 1000,
        ("last_step_timestamp_seconds",): unix("11:30:00") + 0.5,
        ("last_checkpoint_step",): 100,
        ("last_checkpoint_timestamp_seconds",): unix("11:20:00"),
        ("checkpoint_verification_failed",): 1,
        ("hung",): 1,
        ("hang_limit_seconds", "phase=start"): 7200,
        ("hang_limit_seconds", "phase=step"): 300,
        ("hang_limit_seconds", "phase=checkpoint"): 1800,
        ("straggler_ratio", "rank=5"): 1.8,
        (
            "failure_timestamp_seconds",
            "reason=SpillIntegrity",
            "exit_code=84",
            "exception=SpillIntegrityError",
        ): unix("10:50:00"),
        ("failure_timestamp_seconds", "reason=NodeLost", "exit_code=", "exception="): unix("10:20:00"),
        ("planned_memory_bytes", "tier=host"): 20,
        ("planned_memory_bytes", "tier=pinned"): None,
    }
    seen = {
        key: value(found, f"zerotrain_job_{key[0]}", **dict(pair.split("=") for pair in key[1:]))
        for key in expected
    }
    assert seen == expected


@pytest.mark.unit
@pytest.mark.parametrize(
    "phase", ["Completed", "Failed", "Suspended", "Queued", "Stalled", "Restarting", "Pending"]
)
def test_what_was_found_of_an_attempt_ends_with_it(phase: str) -> None:
    found = telemetry([(KEY, with_status(phase=phase))])
    assert value(found, "zerotrain_job_hung") == 0
    assert value(found, "zerotrain_job_straggler_ratio", rank="5") is None


@pytest.mark.unit
def test_findings_of_an_earlier_attempt_are_not_exported_for_this_one() -> None:
    found = telemetry([(KEY, with_status(attempt=4))])
    assert value(found, "zerotrain_job_hung") == 0
    assert value(found, "zerotrain_job_straggler_ratio", rank="5") is None


@pytest.mark.unit
def test_a_hang_before_the_first_step_is_exported() -> None:
    assert value(telemetry([(KEY, with_status(phase="Starting"))]), "zerotrain_job_hung") == 1


@pytest.mark.unit
def test_a_new_job_has_what_alerts_need_and_nothing_invented() -> None:
    body = with_status()
    del body["status"]
    found = telemetry([(KEY, body)])
    assert value(found, "zerotrain_job_phase", phase="Pending") == 1
    assert value(found, "zerotrain_job_phase_since_timestamp_seconds") == unix("09:00:00")
    for cause in RESTART_CAUSES:
        assert value(found, "zerotrain_job_restarts_total", cause=cause) == 0
    assert value(found, "zerotrain_job_checkpoint_verification_failed") == 0
    for name in ("start", "completion", "attempt_start", "last_step", "last_checkpoint"):
        assert value(found, f"zerotrain_job_{name}_timestamp_seconds") is None
    assert b"MyError" not in generate_latest(telemetry([(KEY, with_status())]).registry)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("phase", "began"),
    [
        ("Pending", "11:00:00"),
        ("Starting", "11:00:30"),
        ("Running", "11:02:00"),
        ("Restarting", "10:50:00"),
        ("Failed", "12:00:00"),
        ("Queued", "11:02:00"),  # no condition of its own: the newest change
    ],
)
def test_when_a_phase_began(phase: str, began: str) -> None:
    found = telemetry([(KEY, with_status(phase=phase, completionTime="2026-01-31T12:00:00Z"))])
    assert value(found, "zerotrain_job_phase_since_timestamp_seconds") == unix(began)


@pytest.mark.unit
@pytest.mark.parametrize(
    "nonsense",
    [
        {"restarts": {"app": "many"}},
        {"progress": [1]},
        {"failures": [7]},
        {"startTime": "yesterday"},
        {"conditions": [{"status": "True"}]},
        {"checkpoint": {"last": {}}},
    ],
)
def test_a_status_that_cannot_be_read_costs_its_own_series(nonsense: Json) -> None:
    other = JobKey("ml", "well")
    found = telemetry([(KEY, with_status(**nonsense)), (other, with_status())])
    assert value(found, "zerotrain_job_step") is None
    assert value(found, "zerotrain_job_step", job_name="well") == 120


@pytest.mark.unit
def test_a_job_that_changed_is_read_again_and_one_that_went_is_forgotten() -> None:
    jobs = [(KEY, with_status())]
    found = telemetry(jobs)
    assert value(found, "zerotrain_job_step") == 120
    newer = with_status(progress={"step": 121})
    newer["metadata"]["resourceVersion"] = "2"
    jobs[:] = [(KEY, newer)]
    assert value(found, "zerotrain_job_step") == 121
    jobs.clear()
    assert value(found, "zerotrain_job_step") is None


@pytest.mark.unit
def test_a_standby_replica_exports_no_job() -> None:
    assert value(telemetry([(KEY, with_status())], leads=False), "zerotrain_job_step") is None


@pytest.mark.tools
def test_what_is_exported_equals_the_catalogue(promtool: Any) -> None:
    found = telemetry([(KEY, with_status(completionTime="2026-01-31T12:00:00Z"))])
    found.request("PUT", "pods", 201, 0.1)
    found.set_unreadable({("pods", "ml"): True})
    text = generate_latest(found.registry).decode()
    openmetrics = generate_openmetrics(found.registry).decode()  # type: ignore[no-untyped-call]
    strict = list(parse_openmetrics(openmetrics))  # type: ignore[no-untyped-call]
    for families in (list(parse_text(text)), strict):
        labels = dict(label_sets(families))
        assert set(labels) <= set(exported())
        for spec in (*OPERATOR_METRICS, *JOB_METRICS):
            for name, expected in spec.samples():
                assert labels[name] == frozenset(expected), name
    run_program([promtool, "check", "metrics"], stdin=text)


def label_sets(families: list[Any]) -> Iterator[tuple[str, frozenset[str]]]:
    for family in families:
        for sample in family.samples:
            yield sample.name, frozenset(sample.labels)


@pytest.mark.unit
def test_the_operators_own_are_born_at_0() -> None:
    found = Telemetry()
    for spec in OPERATOR_METRICS:
        if spec.kind is MetricKind.INFO or not all(spec.labels.values()):
            continue  # labels of requests and of namespaces are known with the first request
        name = f"{spec.name}_count" if spec.kind is MetricKind.HISTOGRAM else spec.name
        own = {label: values[0] for label, values in spec.labels.items()}
        assert found.registry.get_sample_value(name, own) == 0, name
    read = found.registry.get_sample_value
    found.request("GET", "pods", 200)
    errors = {"verb": "GET", "resource": "pods", "code": "503"}
    assert read("zerotrain_operator_api_requests_total", errors) == 0
    assert read("zerotrain_operator_api_requests_total", errors | {"code": "200"}) == 1
    found.count_jobs({"Running": 3})
    found.count_jobs({"Failed": 1})
    assert read("zerotrain_operator_jobs", {"phase": "Running"}) == 0
    assert (read("process_resident_memory_bytes", {}) or 0) > 1 << 20


@pytest.mark.unit
async def test_the_age_of_the_oldest_key_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("zerotrain.operator.controller.work_queue.time.monotonic", lambda: now[0])
    queue = WorkQueue[str]()
    assert queue.oldest_age_s == 0
    queue.add("a")
    now[0] = 103.0
    queue.add("b")
    queue.add("a")  # waits already
    now[0] = 104.0
    assert queue.oldest_age_s == 4.0
    assert await queue.get() == "a"
    assert queue.oldest_age_s == 1.0
