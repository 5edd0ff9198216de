"""Table of `reconcile` when nodes stop answering, are declared dead or vanish under their workers."""

from __future__ import annotations

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
    pending,
    progress,
    ready,
    seen,
    stamp,
    status,
)
from zerotrain.contract.progress import Motion
from zerotrain.contract.progress import Phase as RankPhase
from zerotrain.operator.reconcile import (
    DeletePods,
    DeleteWorkers,
    NodeTaint,
    NodeView,
    PodView,
    YieldState,
)

pytestmark = pytest.mark.unit


END_ALL = DeleteWorkers(attempt=1, grace_s=1)
FIRST_AT_ONCE = DeletePods(names_uids=(("gpt-1-0", "pod-1-0"),), grace_s=0)


def silent(index: int, s_ago: float, learned_s_ago: float | None = None) -> NodeView:
    learned_at = ago(s_ago if learned_s_ago is None else learned_s_ago)
    return NodeView(name=f"node-{index}", ready=False, not_ready_since=ago(s_ago), learned_at=learned_at)


def dead(index: int) -> NodeView:
    taint = NodeTaint(key="node.kubernetes.io/out-of-service", value="nodeshutdown", effect="NoExecute")
    return NodeView(name=f"node-{index}", ready=False, not_ready_since=ago(5), taints=(taint,))


def vanished(index: int) -> NodeView:
    return NodeView(name=f"node-{index}", ready=False, gone=True)


def on(
    *pods: PodView, id: str, nodes: tuple[NodeView, ...], want: Want, phase: str = "Running", **more: Any
) -> Row:
    """Row of a first attempt of two workers on node-0 and node-1, with these node views."""
    signs = {
        name: more.pop(name)
        for name in ("progress", "step_moved_at", "synced_at", "last_responses", "unasked", "yielding")
        if name in more
    }
    observed = seen(*pods, nodes={node.name: node for node in nodes}, **signs)
    if "status_progress" in more:
        more["progress"] = more.pop("status_progress")
    return Row(
        id=id, job=job(spec=more.pop("spec", None), status=status(phase, **more)), seen=observed, want=want
    )


LOST = Want(
    phase="Restarting",
    actions=(END_ALL,),
    events=("NodeLost",),
    fields={
        "restarts.infra": 1,
        "restarts.app": 0,
        "failures.0.reason": "NodeLost",
        "failures.0.node": "node-0",
        "failures.0.exitCode": None,
    },
    messages={"event": "its node is not ready since 11:58:59 UTC"},
)

ASKED = stamp(ago(30))
YIELDING = {
    "yieldRequest": {"reason": "Drain", "requestedAt": ASKED, "message": "why", "joined": True},
    "checkpoint": {"requestedAt": ASKED},
}


def moving(idle_s: float, **longest: float) -> Motion:
    return Motion(idle_seconds=idle_s, silent_seconds=1, steps_seen=20, **longest)


PACE = [
    on(
        ready(0),
        ready(1),
        id="nobody could ask the node's workers: it has five times as long",
        nodes=(silent(0, 61),),
        unasked={"node-0"},
        want=Want(phase="Running", actions=(), events=(), wake_in_s=239),
    ),
    on(
        ready(0),
        ready(1),
        id="and no longer",
        nodes=(silent(0, 301),),
        unasked={"node-0"},
        want=Want(phase="Restarting", events=("NodeLost",)),
    ),
    on(
        ready(0),
        ready(1),
        id="those of another node could be asked",
        nodes=(silent(0, 61), silent(1, 61)),
        unasked={"node-1"},
        want=LOST,
    ),
    on(
        ready(0),
        ready(1),
        id="steps of two minutes: the node has twice the longest one",
        nodes=(silent(0, 61),),
        progress=progress(20, motion=moving(70, longest_step_seconds=120)),
        step_moved_at=ago(70),
        want=Want(phase="Running", events=(), wake_in_s=179),
    ),
    on(
        ready(0),
        ready(1),
        id="after which it is lost",
        nodes=(silent(0, 241),),
        progress=progress(20, motion=moving(250, longest_step_seconds=120)),
        step_moved_at=ago(250),
        want=Want(phase="Restarting", events=("NodeLost",)),
    ),
    on(
        ready(0),
        ready(1),
        id="a checkpoint takes as long as checkpoints do",
        nodes=(silent(0, 300),),
        progress=progress(
            20,
            phase=RankPhase.CHECKPOINT,
            motion=moving(310, longest_step_seconds=1, longest_checkpoint_seconds=200),
        ),
        step_moved_at=ago(310),
        want=Want(phase="Running", events=()),
    ),
    *(
        on(
            ready(0),
            ready(1),
            id=f"what ranks say of their pace buys an hour at most ({longest})",
            nodes=(silent(0, 3601),),
            progress=progress(20, motion=moving(9000, longest_step_seconds=longest)),
            step_moved_at=ago(9000),
            want=Want(phase="Restarting", events=("NodeLost",)),
        )
        for longest in (1e12, float("inf"), float("nan"), -5.0)
    ),
]

RESPONSES = [
    *(
        on(
            ready(0),
            ready(1),
            id=f"a worker that answers is not lost with its node ({name})",
            nodes=(silent(0, 3000),),
            last_responses={"node-0": ago(4)},
            want=Want(phase=want, events=()),
            phase=phase,
            **more,
        )
        for name, phase, want, more in (
            ("first step", "Running", "Running", {}),
            (
                "checkpoint under way, asked for",
                "Yielding",
                "Yielding",
                {"yielding": YieldState(attempt=1, acked_at=ago(29)), **YIELDING},
            ),
        )
    ),
    on(
        ready(0),
        ready(1),
        id="looked at again when it has not answered for as long",
        nodes=(silent(0, 3000),),
        last_responses={"node-0": ago(4)},
        want=Want(phase="Running", wake_in_s=56),
    ),
    on(
        ready(0),
        ready(1),
        id="the answer of another node's worker does not count",
        nodes=(silent(0, 61), silent(1, 61)),
        last_responses={"node-1": ago(4)},
        want=Want(phase="Restarting", fields={"failures.0.node": "node-0"}),
    ),
    on(
        ready(0),
        ready(1),
        id="nor one of before it fell silent",
        nodes=(silent(0, 61),),
        last_responses={"node-0": ago(200)},
        want=Want(phase="Restarting", events=("NodeLost",)),
    ),
    on(
        ready(0),
        ready(1),
        id="an operator that has just started listens first",
        nodes=(silent(0, 3000),),
        synced_at=ago(5),
        want=Want(phase="Running", events=(), wake_in_s=55),
    ),
    on(
        ready(0),
        ready(1),
        id="so does one that hears late of a node, after the API server was away",
        nodes=(silent(0, 100, learned_s_ago=0),),
        want=Want(phase="Running", events=(), wake_in_s=60),
    ),
    on(
        ready(0),
        ready(1),
        id="for so long and no longer",
        nodes=(silent(0, 160, learned_s_ago=61),),
        want=Want(phase="Restarting", events=("NodeLost",)),
    ),
]

SILENCE = [
    on(
        ready(0),
        ready(1),
        id="a node that is not ready for too long is lost",
        nodes=(silent(0, 61),),
        want=LOST,
    ),
    on(
        ready(0),
        ready(1),
        id="not before the policy's time, which is waited for",
        nodes=(silent(0, 20),),
        want=Want(phase="Running", events=(), wake_in_s=40),
    ),
    on(
        ready(0),
        ready(1),
        id="the policy's time may be another",
        spec={"failurePolicy": {"nodeNotReadySeconds": 600}},
        nodes=(silent(0, 61),),
        want=Want(phase="Running", events=()),
    ),
    on(
        ready(0),
        ready(1),
        id="while steps come, every rank is alive, whatever the control plane knows of its node",
        nodes=(silent(0, 3000),),
        progress=progress(20, step_at=ago(2).timestamp()),
        want=Want(phase="Running", events=(), fields={"restarts.infra": 0}),
    ),
    on(
        ready(0),
        ready(1),
        id="once no step has come for as long, it is lost",
        nodes=(silent(0, 3000),),
        progress=progress(20, step_at=ago(61).timestamp()),
        want=Want(phase="Restarting", fields={"failures.0.reason": "NodeLost"}),
    ),
    on(
        ready(0),
        ready(1),
        id="a step from the future buys no time",
        nodes=(silent(0, 30),),
        progress=progress(20, step_at=ago(-(10**6)).timestamp()),
        want=Want(phase="Running", wake_in_s=30),
    ),
    on(
        ready(0),
        ready(1),
        id="nor does the clock of rank 0's node, ten minutes ahead, at every pass",
        nodes=(silent(0, 3000),),
        progress=progress(20, step_at=ago(-600).timestamp()),
        step_moved_at=ago(61),
        want=Want(
            phase="Restarting",
            fields={"failures.0.reason": "NodeLost", "progress.lastStepTime": stamp(ago(61))},
        ),
    ),
    on(
        ready(0),
        ready(1),
        id="and one that is behind does not take any",
        nodes=(silent(0, 3000),),
        progress=progress(20, step_at=ago(600).timestamp()),
        step_moved_at=ago(2),
        want=Want(phase="Running", wake_in_s=58),
    ),
    on(
        ready(0),
        ready(1),
        id="a future time in a status of before counts as the start of this operator",
        nodes=(silent(0, 3000),),
        status_progress={"attempt": 1, "step": 20, "lastStepTime": stamp(ago(-600))},
        synced_at=ago(5),
        want=Want(phase="Running", wake_in_s=55),
    ),
    on(
        ready(0),
        ready(1),
        id="a step of an earlier attempt says nothing",
        nodes=(silent(0, 61),),
        progress=progress(20, 0, step_at=ago(2).timestamp()),
        want=Want(phase="Restarting"),
    ),
    on(
        pending(0, node="node-0", scheduled=True),
        ready(1),
        id="a pod that has not started there is lost, too",
        phase="Pending",
        nodes=(silent(0, 61),),
        want=Want(phase="Restarting", fields={"failures.0.reason": "NodeLost", "failures.0.log": ""}),
    ),
    on(
        ended(0, 0),
        ready(1),
        id="a worker that is done stays done",
        nodes=(silent(0, 61),),
        want=Want(phase="Running", events=()),
    ),
    on(
        ended(0, 64),
        ready(1),
        id="a code that its user must answer outweighs the node",
        nodes=(silent(0, 61), silent(1, 61)),
        want=Want(phase="Failed", fields={"failures.0.exitCode": 64}),
    ),
    *(
        on(
            ended(0, code),
            ready(1),
            id=f"but not one that tells of files, which go away with the node: {code}",
            nodes=(silent(0, 61),),
            want=Want(phase="Restarting", fields={"failures.0.reason": "NodeLost", "restarts.infra": 1}),
        )
        for code in (65, 66)
    ),
    on(
        going(0, grace_s=1),
        going(1, grace_s=1),
        id="pods of a silent node get their time to go: it may still run and write",
        phase="Restarting",
        nodes=(silent(0, 100),),
        want=Want(phase="Restarting", attempt=1, actions=()),
    ),
    on(
        going(0, grace_s=1, asked_s_ago=121),
        id="then they are removed by force",
        phase="Restarting",
        nodes=(silent(0, 200),),
        want=Want(phase="Restarting", attempt=1, actions=(FIRST_AT_ONCE,)),
    ),
]

FINAL = [
    on(
        ready(0),
        ready(1),
        id="out of service: lost at once, and its pods are removed without waiting for it",
        nodes=(dead(0),),
        want=Want(
            phase="Restarting",
            actions=(END_ALL, FIRST_AT_ONCE),
            fields={"restarts.infra": 1, "failures.0.reason": "NodeLost"},
            messages={"event": "its node is out of service"},
        ),
    ),
    on(
        ready(0),
        ready(1),
        id="so with a node that was deleted",
        nodes=(vanished(0),),
        want=Want(
            phase="Restarting", actions=(END_ALL, FIRST_AT_ONCE), messages={"event": "its node was deleted"}
        ),
    ),
    on(
        going(0, grace_s=3600),
        ready(1),
        id="a pod that somebody is deleting there needs no patience",
        nodes=(dead(0),),
        want=Want(phase="Restarting", actions=(END_ALL, FIRST_AT_ONCE)),
    ),
    on(
        going(0, grace_s=1),
        going(1, grace_s=1),
        id="declared dead while its pods go: they are removed at once",
        phase="Restarting",
        nodes=(dead(0),),
        want=Want(phase="Restarting", attempt=1, actions=(FIRST_AT_ONCE,)),
    ),
    on(
        ready(0),
        ready(1),
        id="a job in suspension does not wait for its checkpoint either",
        phase="Suspending",
        spec={"suspend": True},
        checkpoint={"requestedAt": "2026-01-01T11:59:59Z"},
        nodes=(dead(0),),
        want=Want(phase="Suspending", fields={"failures.0.reason": "NodeLost", "restarts.total": 0}),
    ),
    on(
        ready(0),
        ready(1),
        id="a rule about lost nodes",
        spec={"failurePolicy": {"rules": [{"onReasons": ["NodeLost"], "action": "ReplaceNodeAndRestart"}]}},
        nodes=(dead(1),),
        want=Want(phase="Restarting", fields={"excludedNodes.0.name": "node-1", "failures.0.rule": 0}),
    ),
    on(
        ready(0),
        ready(1),
        id="both nodes: the lower index is named, the other is in the record",
        nodes=(dead(0), dead(1)),
        want=Want(fields={"failures.0.ranks.0.node": "node-0", "failures.0.ranks.1.node": "node-1"}),
    ),
]

BACK = [
    on(
        ended(0, 255, exit_reason="Unknown"),
        ready(1),
        id="a node that was started anew: containerd does not know how the container ended",
        spec={"failurePolicy": {"maxRestarts": 0}},
        nodes=(),
        want=Want(phase="Restarting", fields={"restarts.infra": 1, "failures.0.reason": "NodeLost"}),
    ),
    on(
        ended(0, 137, exit_reason="ContainerStatusUnknown"),
        ready(1),
        id="a node that was started anew: the kubelet does not find the container",
        spec={"failurePolicy": {"maxRestarts": 0}},
        nodes=(),
        want=Want(phase="Restarting", fields={"restarts.infra": 1, "failures.0.reason": "NodeLost"}),
    ),
    on(
        ended(0, 137, exit_reason="ContainerStatusUnknown", deletion_at=ago(1)),
        ready(1),
        id="a pod that somebody deletes ends like this too",
        nodes=(),
        want=Want(phase="Restarting", fields={"restarts.infra": 1, "failures.0.reason": "PodLost"}),
    ),
    on(
        ended(0, 255, exit_reason="Error"),
        ready(1),
        id="a program that ends with 255 itself",
        nodes=(),
        want=Want(phase="Restarting", fields={"restarts.app": 1, "failures.0.reason": "RankFailed"}),
    ),
    on(
        ended(0, 255, exit_reason="Error", deletion_at=ago(1)),
        ready(1),
        id="also where somebody deletes its pod",
        nodes=(),
        want=Want(phase="Restarting", fields={"restarts.app": 1, "failures.0.reason": "RankFailed"}),
    ),
]


@pytest.mark.parametrize("row", [*PACE, *RESPONSES], ids=lambda row: row.id)
def test_workers_that_outlive_the_silence_of_their_node(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", SILENCE, ids=lambda row: row.id)
def test_nodes_that_do_not_answer(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", FINAL, ids=lambda row: row.id)
def test_nodes_that_will_not_come_back(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", BACK, ids=lambda row: row.id)
def test_nodes_that_are_back_before_they_were_lost(row: Row) -> None:
    check(row)
