"""Table of `reconcile` after rules have applied: exclusions that expire, hold-offs, restarts without
progress.
"""

from __future__ import annotations

import pytest

from tests.operator.reconcile_builders import (
    NOW,
    Row,
    Want,
    ago,
    check,
    ended,
    job,
    pending,
    progress,
    ready,
    restarts,
    rule,
    ruled,
    running,
    seen,
    stamp,
    status,
)
from zerotrain.operator.api import RestartCause
from zerotrain.operator.api.failures import FailurePolicy
from zerotrain.operator.api.status import Restart
from zerotrain.operator.failure_policy import HUNG, classify, decide
from zerotrain.operator.reconcile import CreateWorkers, DeleteWorkers

pytestmark = pytest.mark.unit


DAY_LATER = "2026-01-02T12:00:00Z"
END_ALL = (DeleteWorkers(attempt=1, grace_s=1),)

NEXT_ATTEMPT = [
    Row(
        id="the next attempt's shape holds the exclusions of that moment",
        job=job(
            status=status(
                "Restarting",
                excludedNodes=[
                    {"name": "node-3", "until": stamp(ago(-60))},
                    {"name": "node-1", "until": stamp(ago(-60))},
                    {"name": "node-2", "until": stamp(ago(0))},
                ],
            )
        ),
        seen=seen(),
        want=Want(
            phase="Pending",
            attempt=2,
            fields={"shape.excludedNodes": ["node-1", "node-3"], "excludedNodes.2": None},
        ),
    ),
    Row(
        id="a pod waits for a node that its attempt may not use any longer: another attempt, uncharged",
        job=job(
            status=status(
                "Pending", attempt=2, shape={"workers": 2, "excludedNodes": ["node-1"]}, podsCreated=False
            )
        ),
        seen=seen(running(0, 2), pending(1, 2)),
        want=Want(
            phase="Restarting",
            attempt=2,
            events=("ExclusionExpired",),
            actions=(DeleteWorkers(attempt=2, grace_s=1),),
            fields={"restarts.total": 0, "nextAttemptTime": None, "failures.0": None},
        ),
    ),
    Row(
        id="so where status still shows the exclusion that is over",
        job=job(
            status=status(
                "Pending",
                attempt=2,
                shape={"workers": 2, "excludedNodes": ["node-1"]},
                excludedNodes=[{"name": "node-1", "until": stamp(ago(1))}],
            )
        ),
        seen=seen(running(0, 2), pending(1, 2)),
        want=Want(phase="Restarting", events=("ExclusionExpired",)),
    ),
    Row(
        id="not where all pods have nodes and one has not started yet",
        job=job(status=status("Pending", attempt=2, shape={"workers": 2, "excludedNodes": ["node-1"]})),
        seen=seen(running(0, 2), pending(1, 2, scheduled=True, node="node-2")),
        want=Want(phase="Pending", attempt=2, events=()),
    ),
    Row(
        id="while it is not over, it is waited for",
        job=job(
            status=status(
                "Pending",
                attempt=2,
                shape={"workers": 2, "excludedNodes": ["node-1"]},
                excludedNodes=[{"name": "node-1", "until": stamp(ago(-20))}],
            )
        ),
        seen=seen(running(0, 2), pending(1, 2)),
        want=Want(phase="Pending", attempt=2, actions=(), wake_in_s=20),
    ),
    Row(
        id="an attempt whose pods all have nodes is left alone",
        job=job(status=status("Running", attempt=2, shape={"workers": 2, "excludedNodes": ["node-1"]})),
        seen=seen(ready(0, 2), ready(1, 2), progress=progress(3, 2)),
        want=Want(phase="Running", attempt=2),
    ),
    Row(
        id="a job in suspension fails by a rule's word",
        job=job(
            spec={"suspend": True, "failurePolicy": {"rules": [rule("FailJob", onExitCodes=[3])]}},
            status=status("Suspending", checkpoint={"requestedAt": stamp(ago(1))}),
        ),
        seen=seen(ended(0, 3), ready(1)),
        want=Want(phase="Failed", events=("FailedByRule",)),
    ),
    Row(
        id="and one with a code that nobody retries goes on to be suspended where a rule would restart it",
        job=job(
            spec={"suspend": True, "failurePolicy": {"rules": [rule("RestartAll", onExitCodes=[66])]}},
            status=status("Suspending", checkpoint={"requestedAt": stamp(ago(1))}),
        ),
        seen=seen(ended(0, 66), ready(1)),
        want=Want(phase="Suspending", fields={"failures.0.exitCode": 66, "restarts.total": 0}),
    ),
]

IDLE = [
    ruled(
        ended(0, 3),
        ready(1),
        id="ends around the same step count as no gain, whichever came last",
        rules=[],
        policy={"maxRestarts": 100, "maxRestartsWithoutProgress": 4},
        restarts=restarts("app", 400, 300, 200, 100, steps=[50, 47, 49, 48]),
        progress=progress(49),
        want=Want(phase="Failed", messages={"event": "gained no step beyond 50"}),
    ),
    ruled(
        ended(0, 3),
        ready(1),
        id="one step beyond is a gain",
        rules=[],
        policy={"maxRestarts": 100, "maxRestartsWithoutProgress": 4},
        restarts=restarts("app", 400, 300, 200, 100, steps=[50, 47, 49, 48]),
        progress=progress(51),
        want=Want(phase="Restarting", fields={"nextAttemptTime": None}),
    ),
    ruled(
        ended(0, 3),
        ready(1),
        id="all causes count together",
        rules=[],
        policy={"maxRestartsWithoutProgress": 2},
        restarts={
            "recent": [
                {"time": stamp(ago(200)), "cause": "infra", "attempt": 1, "reason": "NodeLost", "step": 7},
                {"time": stamp(ago(100)), "cause": "app", "attempt": 2, "reason": "RankFailed", "step": 7},
            ]
        },
        progress=progress(7),
        want=Want(phase="Failed", events=("NoProgress",)),
    ),
    ruled(
        ended(0, 3),
        ready(1),
        id="but not preemptions",
        rules=[],
        policy={"maxRestartsWithoutProgress": 2},
        restarts=restarts("preemption", 300, 200, 100, steps=[7, 7, 7]),
        progress=progress(7),
        want=Want(phase="Restarting", fields={"restarts.app": 1}),
    ),
    ruled(
        ended(0, 137, disruption="PreemptionByScheduler"),
        ready(1),
        id="which do not end a job that never gained a step",
        rules=[],
        policy={"maxRestartsWithoutProgress": 1},
        restarts=restarts("infra", 300, 200, 100, steps=[7, 7, 7]),
        progress=progress(7),
        want=Want(phase="Restarting", fields={"restarts.preemption": 1}),
    ),
    ruled(
        ended(0, 3),
        ready(1),
        id="a program without steps is judged by its pace",
        rules=[],
        policy={"maxRestartsWithoutProgress": 2, "maxRestarts": 10},
        restarts=restarts("app", 20_000, 10_000, steps=[0, 0]),
        want=Want(phase="Restarting", fields={"nextAttemptTime": None}),
    ),
    ruled(
        ready(1),
        id="infrastructure has a budget of the user's",
        rules=[],
        policy={"maxInfrastructureRestarts": 2},
        restarts=restarts("infra", 200, 100),
        progress=progress(30),
        want=Want(phase="Failed", messages={"event": "raise failurePolicy.maxInfrastructureRestarts"}),
    ),
]


@pytest.mark.parametrize("row", NEXT_ATTEMPT, ids=lambda row: row.id)
def test_between_attempts(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", IDLE, ids=lambda row: row.id)
def test_restarts_that_lead_nowhere(row: Row) -> None:
    check(row)


def test_the_pods_of_the_next_attempt_are_made() -> None:
    """A status write with the attempt's number and its exclusions comes before the pods."""
    row = NEXT_ATTEMPT[0]
    check(
        Row(
            id=row.id,
            job=row.job,
            seen=row.seen,
            want=Want(actions=(CreateWorkers(attempt=2, indices=(0, 1)),)),
        )
    )


def test_hangs_are_held_off_by_their_number_whatever_was_gained_between() -> None:
    """A wrong alarm comes at growing intervals; other failures of a job that makes progress are not
    held off.
    """

    def past(count: int) -> list[Restart]:
        return [
            Restart(time=ago(1000 - n), cause=RestartCause.APP, reason="Hang", step=10 * n)
            for n in range(count)
        ]

    policy = FailurePolicy(max_restarts=100, window_seconds=3600)
    waits = [decide(HUNG, past(n), policy, step=1000, now=NOW).hold_off_s for n in range(8)]
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300]
    other = classify(1)
    assert decide(other, past(3), policy, step=1000, now=NOW).hold_off_s == 0
