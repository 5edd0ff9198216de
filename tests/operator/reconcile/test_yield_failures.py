"""Table of `reconcile` for pods that end while they are asked to stop: rules apply to the ranks' own failures
alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    Row,
    Want,
    ago,
    check,
    ended,
    going,
    job,
    ready,
    restarts,
    running,
    seen,
    stamp,
    status,
)
from zerotrain.operator.reconcile import DeleteWorkers, Observed, PodView

pytestmark = pytest.mark.unit


ANY = {"action": "FailJob", "onMessagePatterns": ["."]}
KILLED = {"action": "FailJob", "onExitCodes": [137, 143]}
LOST = {"action": "FailJob", "onReasons": ["PodLost"]}
PHASES = {"Suspend": "Suspending", "QueueEviction": "Suspending", "Drain": "Yielding", "Resize": "Yielding"}


def killed(index: int, code: int = 137) -> PodView:
    """Return a pod that was ended by the operator's own deletion."""
    return replace(ended(index, code), deletion_at=ago(5), deletion_grace_s=1)


def asked(reason: str, *rules: dict[str, Any], joined: bool = True, s_ago: float = 80) -> dict[str, Any]:
    """Return a job that was asked to yield for this reason."""
    request = {"reason": reason, "requestedAt": stamp(ago(s_ago)), "message": "why", "joined": joined}
    spec: dict[str, Any] = {"failurePolicy": {"rules": list(rules)}, "suspend": reason == "Suspend"}
    more: dict[str, Any] = {"yieldRequest": request, "checkpoint": {"requestedAt": stamp(ago(s_ago))}}
    return job(spec=spec, status=status(PHASES[reason], **more))


def without_saving(body: dict[str, Any]) -> dict[str, Any]:
    body["spec"]["checkpoint"] = {**body["spec"]["checkpoint"], "onTermination": False}
    return body


def moved_often(body: dict[str, Any]) -> dict[str, Any]:
    """Give the job as many restarts by the application as are allowed, at step 90."""
    past = restarts("app", 3000, 2400, 1800, 1200, 600)
    body["status"] |= {"restarts": past, "progress": {"attempt": 1, "step": 90}}
    return body


def row(name: str, what: dict[str, Any], observed: Observed, want: Want) -> Row:
    return Row(id=name, job=what, seen=observed, want=want)


ROWS = [
    *(
        row(
            f"{reason}: a kill at the end of the grace is none of the rules' business",
            asked(reason, KILLED, LOST, ANY),
            seen(killed(0), killed(1, 143)),
            Want(phase=PHASES[reason], fields={"failures.0": None, "restarts.total": 0}),
        )
        for reason in PHASES
    ),
    row(
        "nor is a pod that somebody drained",
        asked("Suspend", KILLED, ANY, s_ago=5),
        seen(ended(0, 143, disruption="EvictionByEvictionAPI"), going(1)),
        Want(phase="Suspending", fields={"failures.0": None}),
    ),
    row(
        "nor one that is gone",
        asked("Suspend", LOST, ANY, s_ago=5),
        seen(ready(1), gone=(running(0),)),
        Want(phase="Suspending", fields={"failures.0": None}),
    ),
    row(
        "nor what ranks that never met are ended with",
        asked("Suspend", KILLED, ANY, joined=False, s_ago=3),
        seen(killed(0), going(1)),
        Want(phase="Suspending", fields={"failures.0": None}),
    ),
    row(
        "a rank that fails by itself is, also beside one that was killed",
        asked("Suspend", {"action": "FailJob", "onExitCodes": [3]}),
        seen(ended(0, 3), killed(1)),
        Want(phase="Failed", events=("FailedByRule",), fields={"failures.0.exitCode": 3}),
    ),
    row(
        "a move counts the rank's own failure, not our kill",
        asked("Drain", KILLED, s_ago=20),
        seen(ended(0, 3), killed(1)),
        Want(phase="Restarting", fields={"failures.0.exitCode": 3, "restarts.app": 1}),
    ),
    *(
        row(
            f"{reason}: a stop that was asked for through the channel and saved nothing is its answer",
            asked(reason, KILLED, ANY, s_ago=20),
            seen(ended(0, 143), ended(1, 143)),
            Want(
                phase=PHASES[reason],
                actions=(DeleteWorkers(attempt=1, grace_s=1),),
                events=("YieldTimeout",),
                fields={"failures.0": None, "restarts.total": 0},
                messages={"event": "worker 0 (pod gpt-1-0) stopped without a checkpoint"},
            ),
        )
        for reason in PHASES
    ),
    *(
        row(
            f"{reason}: nor do peers fail that are left alone by such a stop, code {code}",
            asked(reason, ANY, s_ago=20),
            seen(ended(0, 143, s_ago=5), ended(1, code, s_ago=4)),
            Want(phase=PHASES[reason], fields={"failures.0": None, "restarts.total": 0}),
        )
        for reason in PHASES
        for code in (1, 134)
    ),
    row(
        "a rank that failed before its peers gave up is a failure",
        asked("Drain", s_ago=70),
        seen(ended(0, 143, s_ago=5), ended(1, 1, s_ago=60)),
        Want(phase="Restarting", fields={"failures.0.exitCode": 1, "restarts.app": 1}),
    ),
    row(
        "without a request it is one, too",
        job(status=status("Running")),
        seen(ended(0, 143), ended(1, 143)),
        Want(phase="Restarting", events=("Killed",), fields={"restarts.app": 1}),
    ),
    row(
        "where nothing is to be saved, nobody is warned",
        without_saving(asked("Drain", s_ago=20)),
        seen(ended(0, 143), ended(1, 143)),
        Want(phase="Yielding", events=()),
    ),
    row(
        "six moves within the hour that save nothing do not end a job that is well",
        moved_often(asked("Drain", s_ago=20)),
        seen(gone=(ended(0, 143), ended(1, 143))),
        Want(
            phase="Pending",
            attempt=2,
            events=("Yielded",),
            fields={"restarts.app": 5, "restarts.preemption": 1},
            messages={"event": "stopped at step 90 without saving it"},
        ),
    ),
]


@pytest.mark.parametrize("item", ROWS, ids=lambda item: item.id)
def test_failures_while_yielding(item: Row) -> None:
    check(item)
