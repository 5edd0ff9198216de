"""Table of `reconcile` when workers do not start: runPolicy.startDeadlineSeconds, and the worker that a
rendezvous timeout blames.
"""

from __future__ import annotations

from dataclasses import replace
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
    pending,
    ready,
    restarts,
    rule,
    running,
    seen,
    stamp,
    status,
)
from zerotrain.contract.progress import Phase
from zerotrain.operator.reconcile import (
    CollectStacks,
    DeleteWorkers,
    PodView,
    StackSource,
    StacksView,
)
from zerotrain.operator.reconcile.inspection import Inspection, RankPace, SlowRank

pytestmark = pytest.mark.unit


END_ALL = DeleteWorkers(attempt=1, grace_s=1)
PULL = "ImagePullBackOff: Back-off pulling image"
STACKS = StacksView(attempt=1, at=NOW, config_map="gpt-1-stacks")
ASK_1 = CollectStacks(attempt=1, sources=(StackSource(worker=1, pod="gpt-1-1", pod_ip="10.0.0.1"),))
NO_NODE = "Unschedulable: 0/4 nodes are available"


def stuck(index: int, **more: Any) -> PodView:
    """Return a pod with a node and without a running program."""
    return pending(index, **{"node": f"node-{index}", "scheduled": True, "waiting": PULL, **more})


def unplaced(index: int, **more: Any) -> PodView:
    return pending(index, unscheduled_reason=NO_NODE, **more)


def waiting_for(
    worker: int | None, *, s_ago: float = 20, attempt: int = 1, phase: Phase = Phase.RENDEZVOUS
) -> Inspection:
    """Return an inspection of ranks that wait for one worker, with the known reason for its absence."""
    late = None
    if worker is not None:
        late = SlowRank(rank=worker, worker=worker, step=0, phase="init", why="it is stopped")
    return Inspection(attempt=attempt, at=ago(s_ago), paces={phase: RankPace(idle_s=200)}, slow_rank=late)


def starting(
    *pods: PodView, id: str, want: Want, limit_s: int | None = 600, began_s_ago: float = 600, **more: Any
) -> Row:
    """Row of a first attempt of two workers that began so long ago."""
    spec = {"runPolicy": {} if limit_s is None else {"startDeadlineSeconds": limit_s}, **more.pop("spec", {})}
    taken = {name: more.pop(name, None) for name in ("problem", "inspection", "stacks")}
    observed = seen(*pods, synced_at=more.pop("synced_at", ago(3600)), **taken)
    stored = status(more.pop("phase", "Pending"), attemptStartTime=stamp(ago(began_s_ago)), **more)
    return Row(id=id, job=job(spec=spec, status=stored), seen=observed, want=want)


DEADLINE = [
    starting(
        running(0),
        stuck(1),
        id="the attempt ends at the cost of the infrastructure, and names pod, node and what it waits for",
        want=Want(
            phase="Restarting",
            actions=(END_ALL,),
            events=("StartDeadlineExceeded",),
            fields={
                "restarts.infra": 1,
                "restarts.app": 0,
                "failures.0.reason": "StartDeadlineExceeded",
                "failures.0.pod": "gpt-1-1",
                "failures.0.node": "node-1",
                "failures.0.rank": 1,
                "failures.0.exitCode": None,
                "failures.0.message": f"not started within 600 s: {PULL}",
                "failures.0.ranks.1": None,
            },
            messages={
                "event": f"worker 1 (rank 1, pod gpt-1-1, node node-1): not started within 600 s: {PULL}"
            },
        ),
    ),
    starting(
        stuck(0),
        stuck(1),
        id="all that have not started are named",
        want=Want(
            phase="Restarting",
            messages={"event": f"{PULL}; also not started: worker 1 (pod gpt-1-1, node node-1): {PULL}"},
            fields={"failures.0.ranks.0.pod": "gpt-1-0", "failures.0.ranks.1.node": "node-1"},
        ),
    ),
    starting(
        unplaced(0),
        unplaced(1),
        id="a job of which no pod has a node is left to the scheduler",
        began_s_ago=10_000_000,
        want=Want(phase="Pending", actions=(), events=()),
    ),
    starting(
        unplaced(0),
        stuck(1),
        id="those that have a node are to blame, and not those that have none",
        want=Want(
            phase="Restarting",
            events=("StartDeadlineExceeded",),
            fields={"failures.0.pod": "gpt-1-1", "failures.0.ranks.1": None},
        ),
    ),
    starting(
        stuck(0, waiting=None),
        running(1),
        id="a pod whose kubelet gives no reason",
        want=Want(
            phase="Restarting", messages={"event": "its image, volumes or init containers are not ready"}
        ),
    ),
    starting(
        running(0),
        stuck(1),
        id="before the deadline: looks again when it is over",
        began_s_ago=590,
        want=Want(phase="Pending", events=("ContainerWaiting",), wake_in_s=10),
    ),
    starting(
        running(0),
        stuck(1),
        id="without the field pods may wait for ever",
        limit_s=None,
        began_s_ago=10_000_000,
        want=Want(phase="Pending", actions=(), events=("ContainerWaiting",)),
    ),
    starting(
        running(0),
        running(1),
        id="all have started: the ranks may take their time to meet",
        began_s_ago=10_000,
        want=Want(phase="Starting", actions=(), events=()),
    ),
    starting(
        running(0),
        stuck(1),
        id="time in which no operator looked does not count",
        began_s_ago=10_000,
        synced_at=ago(590),
        want=Want(phase="Pending", events=("ContainerWaiting",), wake_in_s=10),
    ),
    starting(
        ended(0, 1, s_ago=60),
        stuck(1),
        id="a rank that failed says more than one that waits",
        want=Want(phase="Restarting", events=("RankFailed",), fields={"failures.0.pod": "gpt-1-0"}),
    ),
    starting(
        running(0),
        stuck(1),
        id="a rule may fail the job instead",
        spec={"failurePolicy": {"rules": [rule("FailJob", onReasons=["StartDeadlineExceeded"])]}},
        want=Want(phase="Failed", events=("FailedByRule",)),
    ),
    starting(
        running(0),
        stuck(1),
        id="a rule may keep off the node that does not start it",
        spec={
            "failurePolicy": {"rules": [rule("ReplaceNodeAndRestart", onReasons=["StartDeadlineExceeded"])]}
        },
        want=Want(phase="Restarting", fields={"excludedNodes.0.name": "node-1"}),
    ),
    starting(
        running(0),
        stuck(1),
        id="the hold-off grows from start to start",
        restarts=restarts("infra", 900, 300, reason="StartDeadlineExceeded", steps=(0, 0)),
        want=Want(phase="Restarting", fields={"nextAttemptTime": stamp(ago(-10))}),
    ),
]


BLAME = [
    starting(
        ended(0, 82),
        stuck(1),
        id="a worker that waits for its image is to blame for the rendezvous, and not who waited for it",
        limit_s=None,
        phase="Starting",
        want=Want(
            phase="Restarting",
            events=("RendezvousTimeout",),
            fields={
                "restarts.infra": 1,
                "failures.0.reason": "RendezvousTimeout",
                "failures.0.pod": "gpt-1-1",
                "failures.0.node": "node-1",
                "failures.0.rank": 1,
                "failures.0.exitCode": None,
                "failures.0.ranks.0.pod": "gpt-1-1",
                "failures.0.ranks.1.pod": "gpt-1-0",
                "failures.0.ranks.1.exitCode": 82,
            },
            messages={
                "event": "worker 1 (rank 1, pod gpt-1-1, node node-1): "
                f"not started when worker 0 timed out in the rendezvous (exit code 82): {PULL}"
            },
        ),
    ),
    starting(
        ended(0, 82),
        stuck(1),
        id="rules by the code still match",
        limit_s=None,
        spec={"failurePolicy": {"rules": [rule("FailJob", onExitCodes=[82], onRanks=[1])]}},
        want=Want(phase="Failed", events=("FailedByRule",)),
    ),
    starting(
        ended(0, 82),
        stuck(1),
        id="and keep off the node of the one that did not start",
        limit_s=None,
        spec={"failurePolicy": {"rules": [rule("ReplaceNodeAndRestart", onExitCodes=[82])]}},
        want=Want(fields={"excludedNodes.0.name": "node-1"}),
    ),
    starting(
        ended(0, 82),
        ended(1, 82),
        id="all had started: as before, the first of those that gave up",
        limit_s=None,
        want=Want(fields={"failures.0.pod": "gpt-1-0", "failures.0.exitCode": 82}),
    ),
    starting(
        ended(0, 82),
        running(1),
        id="one that runs and had not come to the rendezvous",
        limit_s=None,
        spec={"failurePolicy": {"rules": [rule("ReplaceNodeAndRestart", onReasons=["RendezvousTimeout"])]}},
        inspection=waiting_for(1),
        stacks=STACKS,
        want=Want(
            actions=(END_ALL,),
            fields={
                "failures.0.pod": "gpt-1-1",
                "failures.0.rank": 1,
                "failures.0.reason": "RendezvousTimeout",
                "failures.0.stacks": "gpt-1-stacks",
                "excludedNodes.0.name": "node-1",
            },
            messages={"event": "it is stopped, when worker 0 timed out in the rendezvous (exit code 82)"},
        ),
    ),
    *(
        starting(
            ended(0, 82),
            running(1),
            id=f"which is asked for its stacks first {why}",
            limit_s=None,
            inspection=waiting_for(1),
            stacks=stacks,
            want=Want(phase="Pending", actions=(ASK_1,), events=(), wake_in_s=1),
        )
        for why, stacks in (
            ("", None),
            ("in this attempt", replace(STACKS, attempt=0)),
            ("and not for an alarm of before", replace(STACKS, at=ago(60))),
        )
    ),
    *(
        starting(
            ended(0, 82, s_ago=s_ago),
            running(1),
            id=f"and blamed all the same when {why}",
            limit_s=None,
            inspection=waiting_for(1, s_ago=65),
            stacks=stacks,
            want=Want(actions=(END_ALL,), fields={"failures.0.pod": "gpt-1-1", "failures.0.stacks": ""}),
        )
        for why, s_ago, stacks in (
            ("they cannot be kept", 6, replace(STACKS, config_map="")),
            ("they do not come", 10, None),
        )
    ),
    *(
        starting(
            ended(0, 82),
            last,
            id=f"nobody is accused by {what}",
            limit_s=None,
            inspection=look,
            want=Want(fields={"failures.0.pod": "gpt-1-0", "failures.0.exitCode": 82}),
        )
        for what, last, look in (
            ("no look", running(1), None),
            ("an old look", running(1), waiting_for(1, s_ago=90)),
            ("a look at another attempt", running(1), waiting_for(1, attempt=2)),
            ("a look at ranks that had met", running(1), waiting_for(1, phase=Phase.INIT)),
            ("a look that finds nobody", running(1), waiting_for(None)),
            ("what it found of one that gave up, too", ended(1, 82), waiting_for(1)),
            ("a worker that there is not", running(1), waiting_for(7)),
        )
    ),
    starting(
        ended(0, 82),
        ended(1, 137, exit_reason="OOMKilled"),
        id="a peer that was killed is the cause",
        limit_s=None,
        want=Want(fields={"failures.0.pod": "gpt-1-1", "failures.0.reason": "OutOfMemory"}),
    ),
]


@pytest.mark.parametrize("row", DEADLINE, ids=lambda row: row.id)
def test_a_start_deadline(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", BLAME, ids=lambda row: row.id)
def test_whom_a_rendezvous_that_timed_out_blames(row: Row) -> None:
    check(row)


def test_a_long_list_of_workers_is_cut() -> None:
    pods = [replace(stuck(index), name=f"gpt-1-{index}") for index in range(40)]
    row = starting(*pods, id="", spec={"workers": 40}, shape={"workers": 40}, want=Want())
    check(replace(row, want=Want(messages={"event": "and 35 more"}, fields={"failures.0.ranks.16": None})))


def test_once_joined_nothing_is_late() -> None:
    check(starting(ready(0), ready(1), id="", phase="Running", want=Want(phase="Running", events=())))
