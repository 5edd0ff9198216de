"""Jobs as the operator stores them in the API server, for tests of what users see."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.support.jobs import Json, job_json
from zerotrain.client import Event, Job, Pod

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def stamp(seconds_ago: float) -> str:
    return (NOW - timedelta(seconds=seconds_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(kind: str, status: str, reason: str, message: str = "", *, ago_s: float = 60) -> Json:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": stamp(ago_s),
        "observedGeneration": 1,
    }


def failure(attempt: int, **changes: Any) -> Json:
    """Return the record of an attempt that ended because rank 2 failed."""
    return {
        "attempt": attempt,
        "time": stamp(300),
        "pod": f"gpt-{attempt}-1",
        "rank": 2,
        "node": "node-b",
        "exitCode": 1,
        "reason": "RankFailed",
        "cause": "app",
        "message": "RuntimeError: boom",
        "lastLine": "last words",
        "step": 40,
        "action": "RestartAll",
        "log": f"attempt-{attempt}.log",
        "ranks": [],
        **changes,
    }


def running_status() -> Json:
    return {
        "observedGeneration": 1,
        "phase": "Running",
        "attempt": 2,
        "attemptStartTime": stamp(90),
        "startTime": stamp(600),
        "zeroStage": 3,
        "workers": {"desired": 2, "running": 2, "ready": 2, "summary": "2/2"},
        "ranks": {"desired": 4, "running": 4, "ready": 4, "summary": "4/4"},
        "restarts": {"app": 1, "total": 1},
        "progress": {
            "attempt": 2,
            "step": 60,
            "totalSteps": 100,
            "loss": 2.5,
            "tokensPerSecond": 1234.5,
            "stepFlops": 3.21e12,
            "mfu": 0.413,
            "stepSeconds": 0.5,
            "phase": "step",
            "lastStepTime": stamp(2),
        },
        "checkpoint": {
            "last": {
                "step": 60,
                "path": "/checkpoints/gpt/60",
                "time": stamp(5),
                "attempt": 2,
                "durable": True,
            },
            "resumedFromStep": 40,
        },
        "memoryPlan": {
            "verdict": "Fits",
            "ranks": 4,
            "hostBytes": 2 << 30,
            "observed": {"attempt": 2, "hostBytes": 1 << 30},
        },
        "failures": [failure(1)],
        "conditions": [condition("Progressing", "True", "StepAdvanced")],
    }


def job(status: Mapping[str, Any] | None = None, **spec: Any) -> Job:
    """Return the running job with parts of its status and its spec replaced."""
    raw = job_json({f"spec.{name}": value for name, value in spec.items()})
    raw["metadata"] |= {"creationTimestamp": stamp(900), "generation": 1}
    raw["status"] = {**running_status(), **(status or {})}
    return Job.of(raw)


def event(reason: str, message: str, *, ago_s: float = 60, warning: bool = False, pod: str = "") -> Event:
    return Event.of(
        {
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": message,
            "eventTime": stamp(ago_s),
            "involvedObject": {"kind": "Pod" if pod else "ZeroTrainingJob", "name": pod or "gpt"},
        }
    )


def pod(
    worker: int, *, attempt: int = 2, state: Mapping[str, Any] | None = None, phase: str = "Running"
) -> Pod:
    """Return a worker's pod, running unless the state of its container is given."""
    labels = {
        "zerotrain.dev/job": "gpt",
        "zerotrain.dev/attempt": str(attempt),
        "zerotrain.dev/rank": str(worker),
    }
    container = {"name": "worker", "state": state or {"running": {"startedAt": stamp(80)}}}
    return Pod.of(
        {
            "metadata": {"name": f"gpt-{attempt}-{worker}", "namespace": "ml", "labels": labels},
            "spec": {"nodeName": f"node-{'ab'[worker % 2]}"},
            "status": {
                "phase": phase,
                "conditions": [{"type": "Ready", "status": "True" if phase == "Running" else "False"}],
                "containerStatuses": [container],
            },
        }
    )
