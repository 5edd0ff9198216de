"""Diagnosis of `describe`: every kind of trouble has an explanation and advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.support.job_states import NOW, condition, event, failure, job, pod, stamp
from tests.support.jobs import job_json
from zerotrain.client import Event, Job, Pod
from zerotrain.client.diagnosis import Diagnosis, diagnose
from zerotrain.operator.api import Phase

pytestmark = pytest.mark.unit


def look(
    status: Mapping[str, Any] | None = None,
    events: Sequence[Event] = (),
    pods: Sequence[Pod] = (),
    **spec: Any,
) -> Diagnosis:
    return diagnose(job(status, **spec), events, pods, now=NOW)


def text_of(found: Diagnosis) -> str:
    """Return the whole text of a diagnosis."""
    lines = [found.headline, *found.situation]
    for item in found.happenings:
        lines += [item.title, *item.details]
    lines += [f"{item.text} {item.command}" for item in found.advice]
    return "\n".join(lines)


def waiting(reason: str, message: str) -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


HANG = {
    "attempt": 2,
    "detectedAt": stamp(400),
    "step": 61,
    "phase": "step",
    "limitSeconds": 300,
    "rank": 3,
    "worker": 1,
    "pod": "gpt-2-1",
    "node": "node-b",
    "message": "its process says nothing",
    "stacks": "gpt-2-stacks",
}

CASES: list[tuple[str, dict[str, Any], Sequence[Event], Sequence[Pod], list[str]]] = [
    (
        "running",
        {},
        (),
        (pod(0), pod(1)),
        ["step 60 of 100 (60 %), attempt 2", "0.5 s a step", "20s to go", "from the checkpoint of step 40"],
    ),
    (
        "stalled",
        {
            "phase": "Stalled",
            "conditions": [condition("Stalled", "True", "InvalidSpec", "spec.workers: too many")],
        },
        (),
        (),
        ["waits until you correct it", "spec.workers: too many", "kubectl -n ml edit ztj gpt"],
    ),
    (
        "does not fit",
        {"phase": "Stalled", "conditions": [condition("Stalled", "True", "DoesNotFit", "needs 90 GiB")]},
        (),
        (),
        ["needs 90 GiB", "zerotrain plan", "zerotrain.dev/ignore-memory-plan=true"],
    ),
    (
        "a part",
        {
            "phase": "Restarting",
            "conditions": [
                condition("PodsScheduled", "False", "GaveBack", "for 60 s 3 of 8 pods are refused")
            ],
        },
        (),
        (),
        ["gave it back", "describe resourcequota"],
    ),
    (
        "a queue",
        {"phase": "Queued", "conditions": [condition("Admitted", "False", "Queued", "waits for quota")]},
        (),
        (),
        ["waits for quota", "get workloads.kueue.x-k8s.io -l zerotrain.dev/job=gpt"],
    ),
    (
        "an image",
        {
            "phase": "Pending",
            "conditions": [condition("Reconciling", "True", "ContainerWaiting", "worker 0")],
        },
        (),
        (pod(0, state=waiting("ImagePullBackOff", "no such image"), phase="Pending"),),
        ["Pod gpt-2-0 waits: ImagePullBackOff: no such image", "localhost/zerotrain:dev cannot be pulled"],
    ),
    (
        "bad data",
        {
            "phase": "Failed",
            "completionTime": stamp(60),
            "failures": [failure(2, exitCode=65, reason="PermanentFailure", action="FailJob", cause=None)],
            "conditions": [condition("Failed", "True", "PermanentFailure", "attempt 2: no data")],
        },
        (),
        (),
        [
            "gpt has failed",
            "ended 60s ago",
            "Exit code 65",
            "correct data.path",
            "zerotrain logs gpt -n ml --attempt 2",
            "zerotrain delete gpt -n ml",
            "It resumes from step 60",
        ],
    ),
    (
        "out of memory",
        {
            "phase": "Failed",
            "failures": [failure(2, exitCode=137, reason="OutOfMemory")],
            "conditions": [condition("Failed", "True", "RestartsExhausted", "5 of 5 restarts")],
        },
        (),
        (),
        ["5 of 5 restarts", "Raise resources.memory"],
    ),
    (
        "deadline",
        {
            "phase": "Failed",
            "conditions": [condition("Failed", "True", "DeadlineExceeded", "3600 s are over")],
        },
        (),
        (),
        ["3600 s are over", "activeDeadlineSeconds"],
    ),
    (
        "hang",
        {"hang": HANG, "conditions": [condition("Progressing", "False", "StepStale", "step 61")]},
        (),
        (),
        [
            "Hung since 6m40s: step 61 does not end",
            "Held up by rank 3 (pod gpt-2-1, node node-b): its process says nothing",
            "get configmap gpt-2-stacks",
        ],
    ),
    (
        "straggler",
        {"straggler": {"attempt": 2, "rank": 1, "pod": "gpt-2-0", "node": "node-a", "percent": 230}},
        (),
        (),
        ["Held up by rank 1", "230 %", "Is node node-a shared or throttled?"],
    ),
    (
        "hold-off",
        {"phase": "Restarting", "nextAttemptTime": stamp(-40)},
        (),
        (),
        ["The next attempt starts in 40s", "by itself"],
    ),
    (
        "suspending",
        {
            "phase": "Suspending",
            "yieldRequest": {"reason": "Suspend", "requestedAt": stamp(5), "message": ""},
        },
        (),
        (),
        ["asked 5s ago to checkpoint and stop, because spec.suspend is true"],
    ),
    (
        "suspended",
        {
            "phase": "Suspended",
            "conditions": [condition("Suspended", "True", "Suspended", "resumes from step 60")],
        },
        (),
        (),
        ["resumes from step 60", "zerotrain resume gpt -n ml"],
    ),
    (
        "damaged checkpoint",
        {
            "phase": "Completed",
            "checkpoint": {
                "last": {"step": 100, "path": "/c/100", "durable": True},
                "verification": {
                    "state": "Damaged",
                    "step": 100,
                    "startTime": stamp(60),
                    "pod": "gpt-2-verify-1",
                    "message": "3 shards",
                },
            },
        },
        (),
        (),
        ["Verification of step 100: Damaged: 3 shards", "kubectl -n ml logs gpt-2-verify-1"],
    ),
    (
        "yield timeout",
        {},
        (event("YieldTimeout", "the grace is over", warning=True),),
        (),
        ["YieldTimeout: the grace is over", "Raise checkpoint.gracePeriodSeconds"],
    ),
    (
        "tight memory",
        {"memoryPlan": {"verdict": "Tight", "message": "38 of 40 GiB", "gpuBytes": 38 << 30}},
        (),
        (),
        ["Memory plan, Tight: 38 of 40 GiB", "Its memory is tight"],
    ),
    (
        "shrunk",
        {
            "elastic": {
                "baseWorkers": 4,
                "requestedWorkers": 4,
                "workers": 2,
                "reason": "Capacity",
                "message": "2 nodes left",
            }
        },
        (),
        (),
        ["not the one asked for (Capacity): 2 nodes left"],
    ),
]


@pytest.mark.parametrize(
    ("status", "events", "pods", "words"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_every_trouble_has_its_words(
    status: dict[str, Any], events: Sequence[Event], pods: Sequence[Pod], words: list[str]
) -> None:
    text = text_of(look(status, events, pods))
    missing = [word for word in words if word not in text]
    assert missing == [], text


def test_a_job_that_no_operator_has_seen() -> None:
    bare = job({"phase": ""}).raw
    fresh = type(job()).of({**bare, "status": {}})
    text = text_of(diagnose(fresh, now=NOW))
    assert "the operator has not seen the job" in text
    assert "app.kubernetes.io/component=operator" in text
    text = text_of(look({"phase": "", "observedGeneration": 0}, managedBy="kueue.x-k8s.io/multikueue"))
    assert "spec.managedBy is kueue.x-k8s.io/multikueue" in text


def test_an_event_that_repeats_a_failure_is_listed_once() -> None:
    events = [event("RankFailed", "attempt 1: worker 1 (rank 2): exit code 1"), event("Yielded", "step 60")]
    titles = [item.title for item in look(events=events).happenings]
    assert titles == [
        "attempt 1 ended at step 40: RankFailed (rank 2, pod gpt-1-1, node node-b)",
        "Yielded: step 60",
    ]


def test_of_pods_only_problems_are_listed() -> None:
    events = [
        event("Scheduled", "to node-a", pod="gpt-2-0"),
        event("Unhealthy", "Readiness probe failed: 503", pod="gpt-2-0", warning=True),
        event("FailedMount", "no volume", pod="gpt-2-1", warning=True),
    ]
    titles = [item.title for item in look({"failures": []}, events).happenings]
    assert titles == ["FailedMount: Pod gpt-2-1: no volume"]


@pytest.mark.parametrize("phase", [phase.value for phase in Phase])
def test_every_phase_of_the_operator_has_a_sentence(phase: str) -> None:
    headline = look({"phase": phase}).headline
    assert headline.startswith("gpt")
    assert f"is {phase}" not in headline


@pytest.mark.parametrize(
    "status",
    [
        {"phase": 7, "attempt": "x", "progress": [], "conditions": {}, "failures": "x", "checkpoint": None},
        {"progress": {"step": 1e400, "loss": "NaN", "lastStepTime": "yesterday"}, "attempt": 2**70},
        {"failures": [None, {"attempt": True}], "conditions": [7], "hang": [], "memoryPlan": "x"},
    ],
)
def test_a_status_of_another_shape_is_no_error(status: dict[str, Any]) -> None:
    assert look(status).headline.startswith("gpt")


def test_a_job_without_checkpoint_gets_no_advice_to_raise_its_grace() -> None:
    raw = job_json({})
    raw["spec"].pop("checkpoint", None)
    found = diagnose(Job.of(raw), (event("YieldTimeout", "30 s", warning=True),), (), now=NOW)
    assert "gracePeriodSeconds" not in text_of(found)
