"""Table of `reconcile` under failurePolicy.rules: which rule applies, the effect of its action, the limits of
rules.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    Row,
    Want,
    ago,
    check,
    ended,
    last_words,
    progress,
    ready,
    restarts,
    rule,
    ruled,
    stamp,
)
from zerotrain.operator.reconcile import DeleteWorkers

pytestmark = pytest.mark.unit


DAY_LATER = "2026-01-02T12:00:00Z"
END_ALL = (DeleteWorkers(attempt=1, grace_s=1),)

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
            messages={"event": "failurePolicy.rules[2] requires FailJob"},
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
        id="the kubelet's name means the same reason",
        rules=[rule("FailJob", onReasons=["OOMKilled"])],
        want=FAILED,
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


def by_kubelet(pod_reason: str) -> dict[str, Any]:
    """Return the fields that the kubelet writes of a pod that it ends itself."""
    return {"pod_reason": pod_reason, "disruption": "TerminationByKubelet"}


REASONS = [
    ruled(
        ended(0, code, **more),
        ready(1),
        id=f"reason {reason}, code {code}, {', '.join(more) or 'nothing more'}",
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
        ("Evicted", 1, by_kubelet("Evicted")),
        ("Evicted", 137, by_kubelet("Evicted")),
        ("Evicted", 143, by_kubelet("Evicted")),
        ("Preempted", 137, by_kubelet("Preempting")),
        ("Preempted", 143, by_kubelet("Terminated")),
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
            messages={"event": "failurePolicy.rules[0] requires RestartAll; attempt 2"},
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
            events=("NoProgress",),
            messages={"event": "3 restarts in a row gained no step beyond 7, 3 are allowed"},
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
            messages={"event": "the job avoids node node-1 until 2026-01-02 12:00:00 UTC"},
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
        ended(1, 201),
        ready(0),
        id="a program's own high code is no signal",
        rules=[rule("ReplaceNodeAndRestart", onExitCodes=[201, 202], onReasons=["RankFailed"])],
        want=Want(
            phase="Restarting",
            fields={
                "excludedNodes.0.name": "node-1",
                "failures.0.reason": "RankFailed",
                "failures.0.message": "exit code 201 (the training program failed)",
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
            messages={"event": "there is no node to replace"},
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
        want=Want(phase="Restarting", messages={"event": "the number of workers stays: "}),
    ),
]


@pytest.mark.parametrize("row", MATCHING + REASONS, ids=lambda row: row.id)
def test_the_first_rule_that_matches_decides(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", ACTIONS, ids=lambda row: row.id)
def test_actions(row: Row) -> None:
    check(row)
