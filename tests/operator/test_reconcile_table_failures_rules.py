"""reconcile under failurePolicy.rules: which rule speaks, what its action does, what no rule can do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    NOW,
    Row,
    Want,
    ago,
    check,
    ended,
    job,
    last_words,
    pending,
    progress,
    ready,
    restarts,
    running,
    seen,
    stamp,
    status,
)
from zerotrain.operator.api import RestartCause
from zerotrain.operator.failure_policy import HUNG, Budget, PastRestart, WorkerEnd, decide, judge
from zerotrain.operator.reconcile import CreateWorkers, DeleteWorkers, PodView

DAY_LATER = "2026-01-02T12:00:00Z"
END_ALL = (DeleteWorkers(attempt=1, grace_s=1),)


def rule(action: str, **on: Any) -> dict[str, Any]:
    return {"action": action, **on}


def ruled(
    *pods: PodView, id: str, rules: list[dict[str, Any]], want: Want, now: Any = NOW, **more: Any
) -> Row:
    """A running first attempt of two workers under these rules."""
    spec = {"failurePolicy": {"rules": rules, **more.pop("policy", {})}, **more.pop("spec", {})}
    observed = seen(*pods, progress=more.pop("progress", None))
    return Row(id=id, job=job(spec=spec, status=status("Running", **more)), seen=observed, want=want, now=now)


FAILED = Want(phase="Failed", events=("FailedByRule",), conditions={"Failed": ("True", "FailedByRule")})
RESTARTED = Want(phase="Restarting", actions=END_ALL)

MATCHING = [
    ruled(
        ended(0, 3),
        ready(1),
        id="no rule matches: the built-in table decides",
        rules=[rule("FailJob", onExitCodes=[4]), rule("FailJob", onReasons=["NodeLost"])],
        want=Want(phase="Restarting", fields={"failures.0.rule": None, "failures.0.action": "RestartAll"}),
    ),
    ruled(
        ended(0, 3),
        ready(1),
        id="the first of two rules that match decides",
        rules=[rule("RestartAll", onExitCodes=[3]), rule("FailJob", onExitCodes=[3])],
        want=Want(phase="Restarting", fields={"failures.0.rule": 0, "restarts.app": 1}),
    ),
    ruled(
        ended(0, 3),
        ready(1),
        id="and the other way round",
        rules=[rule("FailJob", onExitCodes=[3]), rule("RestartAll", onExitCodes=[3])],
        want=FAILED,
    ),
    ruled(
        ended(0, 3),
        ready(1),
        id="a later rule decides where the earlier ones do not match",
        rules=[
            rule("RestartAll", onExitCodes=[4]),
            rule("RestartAll", onReasons=["OutOfMemory"]),
            rule("FailJob", onReasons=["RankFailed"]),
        ],
        want=Want(
            phase="Failed",
            fields={"failures.0.rule": 2, "failures.0.action": "FailJob", "failures.0.cause": None},
            says={"event": "failurePolicy.rules[2] says FailJob"},
        ),
    ),
    ruled(
        ended(0, 3),
        ready(1),
        id="all that a rule names must hold",
        rules=[rule("FailJob", onExitCodes=[3], onReasons=["OutOfMemory"])],
        want=RESTARTED,
    ),
    ruled(
        ended(0, 137, exit_reason="OOMKilled"),
        ready(1),
        id="exit code and reason both hold",
        rules=[rule("FailJob", onExitCodes=[137], onReasons=["OutOfMemory"])],
        want=FAILED,
    ),
    ruled(
        ended(1, 3, termination=last_words(3, rank=1)),
        ready(0),
        id="by rank",
        rules=[rule("RestartAll", onRanks=[0]), rule("FailJob", onRanks=[1])],
        want=FAILED,
    ),
    ruled(
        ended(1, 137),
        ready(0),
        id="a worker that was killed as a whole stands for all its ranks",
        spec={"ranksPerWorker": 4},
        rules=[rule("RestartAll", onRanks=[3, 8]), rule("FailJob", onRanks=[6])],
        want=FAILED,
    ),
    ruled(
        ended(0, 3, termination=last_words(3, rank=0, exception="RuntimeError: NCCL error: Xid 79")),
        ready(1),
        id="by what the exception says",
        rules=[rule("FailJob", onMessagePatterns=["^NCCL"]), rule("FailJob", onMessagePatterns=[r"Xid \d+"])],
        want=Want(phase="Failed", fields={"failures.0.rule": 1}),
    ),
    ruled(
        ended(0, 3, termination=last_words(3, rank=0, exception="E: x", last_line="bad sector on nvme0n1")),
        ready(1),
        id="by the last line",
        rules=[rule("FailJob", onMessagePatterns=["(?i)BAD SECTOR"])],
        want=FAILED,
    ),
    ruled(
        ended(0, 137, pod_reason="Evicted", pod_message="The node was low on resource: memory."),
        ready(1),
        id="by what the cluster says",
        rules=[rule("FailJob", onMessagePatterns=["low on resource: memory"])],
        want=FAILED,
    ),
    ruled(
        ended(0, 3, termination=last_words(3, rank=0, exception="a" * 5000 + "needle")),
        ready(1),
        id="texts are matched as status shows them: both ends of a long one",
        rules=[rule("FailJob", onMessagePatterns=["needle$"])],
        want=FAILED,
    ),
    ruled(
        ready(1),
        id="a pod that nobody knows the end of has no code",
        rules=[rule("FailJob", onExitCodes=[1, 137]), rule("RestartAllIgnoreBudget", onReasons=["PodLost"])],
        want=Want(phase="Restarting", fields={"failures.0.rule": 1, "restarts.uncharged": 1}),
    ),
]

REASONS = [
    ruled(
        ended(0, code, **more),
        ready(1),
        id=f"reason {reason}",
        rules=[rule("FailJob", onReasons=[reason])],
        want=Want(phase="Failed", fields={"failures.0.reason": reason, "failures.0.rule": 0}),
    )
    for reason, code, more in (
        ("OutOfMemory", 137, {"exit_reason": "OOMKilled"}),
        ("OutOfMemory", 1, {"termination": last_words(1, exception="torch.OutOfMemoryError: CUDA ...")}),
        ("OutOfMemory", 1, {"termination": last_words(1, exception="MemoryError: ")}),
        ("Killed", 137, {}),
        ("NodeLost", 137, {"pod_reason": "NodeLost"}),
        ("NodeLost", 143, {"disruption": "DeletionByTaintManager"}),
        ("Preempted", 143, {"disruption": "PreemptionByScheduler"}),
        ("Preempted", 137, {"pod_reason": "Preempting"}),
        ("Evicted", 137, {"pod_reason": "Evicted"}),
        ("PodRejected", 137, {"pod_reason": "UnexpectedAdmissionError"}),
        ("PodLost", 137, {"deletion_at": ago(0)}),
        ("RendezvousTimeout", 82, {}),
        ("SpillIntegrity", 84, {}),
        ("RankFailed", 1, {}),
        ("PermanentFailure", 64, {}),
    )
]

ACTIONS = [
    ruled(
        ended(0, 66),
        ready(1),
        id="RestartAll overrides the built-in end of the job",
        rules=[rule("RestartAll", onExitCodes=[66])],
        want=Want(
            phase="Restarting",
            actions=END_ALL,
            events=("PermanentFailure",),
            fields={"restarts.app": 1, "failures.0.reason": "PermanentFailure"},
            says={"event": "failurePolicy.rules[0] says RestartAll; attempt 2"},
        ),
    ),
    ruled(
        ended(0, 3),
        ready(1),
        id="RestartAll is charged",
        rules=[rule("RestartAll", onExitCodes=[3])],
        policy={"maxRestarts": 1},
        restarts=restarts("app", 100),
        want=Want(phase="Failed", events=("RestartsExhausted",)),
    ),
    ruled(
        ended(0, 3),
        ready(1),
        id="RestartAllIgnoreBudget is not",
        rules=[rule("RestartAllIgnoreBudget", onExitCodes=[3])],
        policy={"maxRestarts": 0},
        want=Want(
            phase="Restarting",
            fields={
                "restarts.app": 0,
                "restarts.uncharged": 1,
                "restarts.total": 1,
                "restarts.recent.0.charged": False,
            },
        ),
    ),
    ruled(
        ended(0, 5),
        ready(1),
        id="nor does it count later",
        rules=[rule("RestartAllIgnoreBudget", onExitCodes=[3])],
        policy={"maxRestarts": 1},
        restarts={
            "uncharged": 1,
            "total": 1,
            "recent": [
                {"time": stamp(ago(60)), "cause": "app", "attempt": 1, "step": 5, "charged": False},
            ],
        },
        want=Want(phase="Restarting", fields={"restarts.app": 1, "restarts.total": 2}),
    ),
    ruled(
        ended(0, 3),
        ready(1),
        id="but restarts that lead nowhere end the job whatever a rule says",
        rules=[rule("RestartAllIgnoreBudget", onExitCodes=[3])],
        policy={"maxRestarts": 0, "maxRestartsWithoutProgress": 3},
        restarts={
            "recent": [
                {
                    "time": stamp(ago(age)),
                    "cause": "app",
                    "attempt": 4 - age // 100,
                    "step": 7,
                    "charged": False,
                }
                for age in (300, 200, 100)
            ]
        },
        progress=progress(7),
        want=Want(
            phase="Failed",
            events=("NoStepGained",),
            says={"event": "3 restarts in a row gained no step beyond 7, 3 are allowed"},
        ),
    ),
    ruled(
        ended(1, 84),
        ready(0),
        id="ReplaceNodeAndRestart keeps the job off the node",
        rules=[rule("ReplaceNodeAndRestart", onReasons=["SpillIntegrity"])],
        want=Want(
            phase="Restarting",
            fields={
                "excludedNodes.0.name": "node-1",
                "excludedNodes.0.until": DAY_LATER,
                "excludedNodes.0.reason": "SpillIntegrity",
                "restarts.infra": 1,
            },
            says={"event": "the job keeps off node-1 until 2026-01-02 12:00:00 UTC"},
        ),
    ),
    ruled(
        ended(1, 201),
        ready(0),
        id="for as long as the policy says; what is over is forgotten",
        rules=[rule("ReplaceNodeAndRestart", onExitCodes=[201, 202])],
        policy={"nodeExclusionSeconds": 600},
        excludedNodes=[
            {"name": "node-7", "until": stamp(ago(1))},
            {"name": "node-9", "until": stamp(ago(-60))},
            {"name": "node-1", "until": stamp(ago(-30))},
        ],
        want=Want(
            fields={
                "excludedNodes.0.name": "node-9",
                "excludedNodes.1.name": "node-1",
                "excludedNodes.1.until": "2026-01-01T12:10:00Z",
                "excludedNodes.2": None,
            },
        ),
    ),
    ruled(
        ended(1, 201, node=None),
        ready(0),
        id="without a node it is a restart",
        rules=[rule("ReplaceNodeAndRestart", onExitCodes=[201])],
        want=Want(
            phase="Restarting",
            fields={"excludedNodes.0": None},
            says={"event": "there is no node to replace"},
        ),
    ),
    ruled(
        ended(0, 84),
        ready(1),
        id="damaged spill leaves its node without any rule",
        rules=[],
        want=Want(fields={"excludedNodes.0.name": "node-0", "failures.0.action": "ReplaceNodeAndRestart"}),
    ),
    ruled(
        ended(0, 84),
        ready(1),
        id="a rule may allow more than one damaged spill",
        rules=[rule("ReplaceNodeAndRestart", onReasons=["SpillIntegrity"])],
        restarts=restarts("infra", 7200, reason="SpillIntegrity"),
        progress=progress(50),
        want=Want(phase="Restarting", fields={"restarts.infra": 2}),
    ),
    ruled(
        ended(0, 137, exit_reason="OOMKilled"),
        ready(1),
        ready(2),
        ready(3),
        id="ShrinkAndRestart goes on with fewer workers",
        spec={"workers": 4, "elastic": {"minWorkers": 2, "maxWorkers": 4}},
        shape={"workers": 4},
        rules=[rule("ShrinkAndRestart", onReasons=["OutOfMemory"])],
        want=Want(phase="Restarting", fields={"restarts.app": 1, "failures.0.action": "ShrinkAndRestart"}),
    ),
    ruled(
        ended(0, 137),
        ready(1),
        id="at the smallest size it is a restart, and says so",
        spec={"elastic": {"minWorkers": 2, "maxWorkers": 4}},
        rules=[rule("ShrinkAndRestart", onReasons=["Killed"])],
        want=Want(phase="Restarting", says={"event": "the size stays: "}),
    ),
]

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
        want=Want(phase="Failed", says={"event": "gained no step beyond 50"}),
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
        want=Want(phase="Failed", events=("NoStepGained",)),
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
        want=Want(phase="Failed", says={"event": "raise failurePolicy.maxInfrastructureRestarts"}),
    ),
]


@pytest.mark.parametrize("row", MATCHING + REASONS, ids=lambda row: row.id)
def test_the_first_rule_that_matches_decides(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", ACTIONS, ids=lambda row: row.id)
def test_actions(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", NEXT_ATTEMPT, ids=lambda row: row.id)
def test_between_attempts(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", IDLE, ids=lambda row: row.id)
def test_restarts_that_lead_nowhere(row: Row) -> None:
    check(row)


def test_the_pods_of_the_next_attempt_are_made() -> None:
    """With its number and its exclusions in one status write before them."""
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
    """An alarm that is wrong comes ever more rarely; other failures of a job that gets ahead do not wait."""

    def past(count: int) -> list[PastRestart]:
        return [
            PastRestart(time=ago(1000 - n), cause=RestartCause.APP, reason="Hang", step=10 * n)
            for n in range(count)
        ]

    budget = Budget(max_restarts=100, window_s=3600)
    waits = [decide(HUNG, past(n), budget, step=1000, now=NOW).hold_off_s for n in range(8)]
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300]
    other = judge(WorkerEnd(exit_code=1))
    assert decide(other, past(3), budget, step=1000, now=NOW).hold_off_s == 0
