"""Table of `reconcile` for a user's own program that is asked to stop, by the operator or by a deletion of
its pods: each rank may react in its own way.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
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
    last_words,
    ready,
    seen,
    settled,
    stamp,
    status,
)
from zerotrain.operator.reconcile import DeleteWorkers, Observed, PodView, RequestYield, YieldState

pytestmark = pytest.mark.unit


ACKED = YieldState(attempt=1, acked_at=ago(18))
UNANSWERED = YieldState(attempt=1, error="timeout")
KILL = (DeleteWorkers(attempt=1, grace_s=1),)
PHASES = {"Suspend": "Suspending", "QueueEviction": "Suspending", "Drain": "Yielding", "Resize": "Yielding"}
OWN = {"command": ["python", "own.py"]}


def asked(
    reason: str = "Suspend", *, s_ago: float = 20, spec: dict[str, Any] = OWN, **more: Any
) -> dict[str, Any]:
    """Return a job that was asked to stop so long ago, with 60 s to do so."""
    request = {"reason": reason, "requestedAt": stamp(ago(s_ago)), "message": "why", "joined": True, **more}
    kept: dict[str, Any] = {"yieldRequest": request, "checkpoint": {"requestedAt": stamp(ago(s_ago))}}
    return job(spec={**spec, "suspend": reason == "Suspend"}, status=status(PHASES[reason], **kept))


def deleted(pod: PodView, *, s_ago: float = 19) -> PodView:
    """Return a pod that got SIGTERM by a deletion with the job's own grace period."""
    return replace(pod, deletion_at=ago(s_ago) + timedelta(seconds=60), deletion_grace_s=60)


def row(name: str, what: dict[str, Any], observed: Observed, want: Want) -> Row:
    return Row(id=name, job=what, seen=observed, want=want)


WAITS = Want(actions=(), events=(), fields={"failures.0": None, "restarts.total": 0})

GRACE = [
    *(
        row(
            f"{reason}: a rank that SIGTERM ended leaves the one that saves its whole grace",
            asked(reason),
            seen(ready(0), ended(1, 143, s_ago=17), yielding=ACKED),
            replace(WAITS, phase=PHASES[reason], wake_in_s=55),
        )
        for reason in PHASES
    ),
    *(
        row(
            f"so does a peer that lost its connection to it, code {code}",
            asked(spec={**OWN, "workers": 3}),
            seen(ready(0), ended(1, 143, s_ago=17), ended(2, code, s_ago=16), yielding=ACKED),
            replace(WAITS, phase="Suspending"),
        )
        for code in (1, 134)
    ),
    row(
        "and under SIGTERM by a deletion, also where the pod is gone by then",
        asked(),
        seen(going(0, asked_s_ago=19), gone=(deleted(ended(1, 143, s_ago=17)),)),
        replace(WAITS, wake_in_s=46),
    ),
    row(
        "or nobody saw its end",
        asked(),
        seen(going(0, asked_s_ago=19)),
        replace(WAITS, wake_in_s=46),
    ),
    row(
        "a rank that nobody told yet is told",
        asked("Drain", s_ago=2),
        seen(ready(0), ended(1, 143, disruption="EvictionByEvictionAPI")),
        Want(actions=(RequestYield(attempt=1, pod="gpt-1-0", pod_ip="10.0.0.0"),), events=()),
    ),
    row(
        "not beyond the grace",
        asked(s_ago=84),
        seen(ready(0), ended(1, 143, s_ago=80), yielding=replace(ACKED, acked_at=ago(83))),
        Want(phase="Suspending", actions=KILL, events=("YieldTimeout",)),
    ),
    row(
        "a rank that failed by itself ends the wait",
        asked(),
        seen(ready(0), ended(1, 1, s_ago=17), yielding=ACKED),
        Want(phase="Suspending", actions=KILL, fields={"failures.0.exitCode": 1, "restarts.total": 0}),
    ),
    row(
        "the one that saved did so for all",
        asked(),
        seen(ended(0, 75, termination=last_words(75, step=42)), ended(1, 143, s_ago=17), yielding=ACKED),
        Want(phase="Suspending", actions=KILL, events=(), fields={"checkpoint.last.step": 42}),
    ),
    row(
        "where none saved it is said",
        asked(),
        seen(ended(0, 143), ended(1, 143), yielding=ACKED),
        Want(phase="Suspending", actions=KILL, events=("YieldTimeout",), fields={"failures.0": None}),
    ),
    row(
        "the engine's ranks save together: of the built-in trainer none can once one is gone",
        asked(spec={}),
        seen(ready(0), ended(1, 143, s_ago=17), yielding=ACKED),
        Want(phase="Suspending", actions=KILL, events=("YieldTimeout",)),
    ),
]

DONE = (ended(0, 0, s_ago=17), ended(1, 0, s_ago=16))
BEFORE = (ended(0, 0, s_ago=22), ended(1, 0, s_ago=21))
LONG_BEFORE = (ended(0, 0, s_ago=300), ended(1, 0, s_ago=81))

CODE_0 = [
    *(
        row(
            f"{reason}: 0 of all ranks that were asked means stopped",
            asked(reason),
            seen(*DONE, yielding=ACKED),
            Want(phase=PHASES[reason], actions=KILL, events=(), fields={"completionTime": None}),
        )
        for reason in PHASES
    ),
    *(
        row(
            f"{reason}: on to {phase} once the pods are gone",
            asked(reason),
            seen(gone=DONE, yielding=ACKED),
            Want(phase=phase, attempt=attempt, fields={"completionTime": None, "restarts.app": 0}),
        )
        for reason, phase, attempt in (
            ("Suspend", "Suspended", 1),
            ("Drain", "Pending", 2),
            ("Resize", "Pending", 2),
        )
    ),
    row(
        "under SIGTERM by a deletion, whatever the node's clock says",
        asked(),
        seen(*(deleted(pod) for pod in BEFORE)),
        Want(phase="Suspending"),
    ),
    row(
        "by a deletion in the midst of a start",
        asked(joined=False),
        seen(gone=tuple(deleted(pod) for pod in DONE)),
        Want(phase="Suspended"),
    ),
    row(
        "the answer was lost",
        asked(),
        seen(*DONE, yielding=UNANSWERED),
        Want(phase="Suspending"),
    ),
    row(
        "another operator asked",
        asked(),
        seen(*DONE, synced_at=ago(5)),
        Want(phase="Suspending"),
    ),
    row(
        "another operator asked, and the clock of their nodes is behind",
        asked(),
        seen(*BEFORE, synced_at=ago(5)),
        Want(phase="Suspending", actions=KILL),
    ),
    row(
        "one ended long before the request, the other with it",
        asked(),
        seen(LONG_BEFORE[0], DONE[1]),
        Want(phase="Suspending", actions=KILL),
    ),
    row(
        "all had ended long before the request: complete",
        asked(),
        seen(*LONG_BEFORE, yielding=replace(ACKED, attempt=0)),
        Want(phase="Completed", events=("Completed",)),
    ),
    row(
        "nobody asked: complete",
        job(spec=OWN, status=status("Running")),
        seen(*DONE),
        Want(phase="Completed"),
    ),
    row(
        "suspended when all have ended: complete",
        job(spec={**OWN, "suspend": True}, status=status("Running")),
        seen(*DONE),
        Want(phase="Completed"),
    ),
    row(
        "the built-in trainer ends with 0 when it is done, and only then",
        asked(spec={}),
        seen(*DONE, yielding=ACKED),
        Want(phase="Completed"),
    ),
]


RUNNING = job(spec=OWN, status=status("Running"))
SINGLE = job(spec={**OWN, "workers": 1}, status=status("Running"))
THREE = job(spec={**OWN, "workers": 3}, status=status("Running"))
PREEMPTED = "PreemptionByScheduler"
YIELDS = {"completionTime": None, "failures.0": None, "restarts.preemption": 1, "restarts.total": 1}
GOES_ON = Want(phase="Restarting", events=("Yielded",), fields=YIELDS)


def taken(pod: PodView, disruption: str = PREEMPTED, *, s_ago: float = 19) -> PodView:
    return replace(deleted(pod, s_ago=s_ago), disruption=disruption)


NOT_ASKED_BY_US = [
    *(
        row(
            f"one worker, {how}: 0 means stopped",
            SINGLE,
            seen(pod),
            replace(GOES_ON, messages={"event": "does not prove that it has finished"}),
        )
        for how, pod in {
            "deleted": deleted(ended(0, 0, s_ago=17)),
            "deleted, ended in the same second": deleted(ended(0, 0, s_ago=19)),
            "preempted": taken(ended(0, 0, s_ago=17)),
            "preempted, by a node whose clock is behind": taken(ended(0, 0, s_ago=40)),
            "disrupted and not deleted": ended(0, 0, disruption="EvictionByEvictionAPI"),
            "evicted by its node": ended(0, 0, phase="Failed", pod_reason="Evicted"),
            "put out by its node, deleted long after": taken(
                ended(0, 0, s_ago=900), "TerminationByKubelet", s_ago=60
            ),
        }.items()
    ),
    row("the whole gang preempted", RUNNING, seen(*(taken(pod) for pod in DONE)), GOES_ON),
    row(
        "the pods are gone by then: the next attempt starts",
        RUNNING,
        seen(gone=tuple(deleted(pod) for pod in DONE)),
        Want(phase="Pending", attempt=2, events=("Yielded",), fields=YIELDS),
    ),
    row(
        "before its ranks were seen to meet",
        job(spec={**OWN, "workers": 1}, status=status("Starting")),
        seen(deleted(ended(0, 0, s_ago=17))),
        GOES_ON,
    ),
    row(
        "one was done, the other was stopped",
        RUNNING,
        seen(ended(0, 0, s_ago=300), deleted(DONE[1])),
        GOES_ON,
    ),
    row(
        "the others have the grace from the stop on",
        THREE,
        seen(ended(0, 0, s_ago=300), deleted(ended(1, 0, s_ago=5)), ready(2)),
        replace(WAITS, phase="Running", wake_in_s=60),
    ),
    row(
        "and no more",
        THREE,
        seen(ready(0), deleted(ended(1, 0, s_ago=65), s_ago=70), ready(2)),
        GOES_ON,
    ),
    row(
        "a peer that SIGTERM ended without saving is what it was",
        RUNNING,
        seen(taken(DONE[0]), taken(ended(1, 143, s_ago=16))),
        Want(phase="Restarting", events=("Preempted",), fields={"restarts.preemption": 1}),
    ),
    row(
        "a peer that was lost, too",
        RUNNING,
        seen(deleted(DONE[0])),
        Want(phase="Restarting", events=("PodLost",), fields={"restarts.infra": 1}),
    ),
    row(
        "suspended by then",
        job(spec={**OWN, "suspend": True}, status=status("Running")),
        seen(*(deleted(pod) for pod in DONE)),
        Want(phase="Suspending", fields={"completionTime": None, "restarts.total": 0}),
    ),
    *(
        row(
            f"{how}: complete",
            SINGLE,
            seen(pod),
            Want(phase="Completed", events=("Completed",), fields={"restarts.total": 0}),
        )
        for how, pod in {
            "deleted when it had ended": deleted(ended(0, 0, s_ago=20)),
            "drained away long after": taken(ended(0, 0, s_ago=300), "EvictionByEvictionAPI"),
            "a sidecar failed": ended(0, 0, phase="Failed"),
        }.items()
    ),
    row(
        "what is complete stays so, whatever becomes of the pods",
        job(spec=OWN, status=status("Completed", completionTime=stamp(ago(10)))),
        seen(*(taken(pod) for pod in DONE)),
        Want(phase="Completed", events=()),
    ),
    row(
        "the built-in trainer is done when it says so",
        job(spec={"workers": 1}, status=status("Running")),
        seen(taken(DONE[0])),
        Want(phase="Completed"),
    ),
]


@pytest.mark.parametrize("item", [*GRACE, *CODE_0, *NOT_ASKED_BY_US], ids=lambda item: item.id)
def test_row(item: Row) -> None:
    check(item)


def test_what_is_done_is_complete_after_the_resume() -> None:
    """All ranks exit with 0 after the request, and again, without a request, after the resume."""
    stopping = settled(asked(), seen(*DONE, yielding=ACKED))
    suspended = settled(stopping, seen(gone=DONE, yielding=ACKED))
    assert suspended["status"]["phase"] == "Suspended"
    suspended["spec"]["suspend"] = False
    resumed = settled(suspended, seen(gone=DONE, yielding=ACKED))
    assert resumed["status"]["attempt"] == 2
    again = (ended(0, 0, 2, s_ago=0), ended(1, 0, 2, s_ago=0))
    check(row("again", resumed, seen(*again, yielding=ACKED), Want(phase="Completed", attempt=2)))


def test_what_is_done_is_complete_after_the_preemption() -> None:
    """All ranks exit with 0 at the preemption, which proves nothing, and again, without a request, in the
    next attempt.
    """
    pods = tuple(taken(pod) for pod in DONE)
    ends = settled(RUNNING, seen(*pods))
    next_one = settled(ends, seen(gone=pods))
    assert (next_one["status"]["phase"], next_one["status"]["attempt"]) == ("Pending", 2)
    again = (ended(0, 0, 2, s_ago=0), ended(1, 0, 2, s_ago=0))
    check(row("again", next_one, seen(*again), Want(phase="Completed", attempt=2)))
