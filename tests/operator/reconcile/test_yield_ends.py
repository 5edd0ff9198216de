"""Table of `reconcile` for a yield that ends otherwise than by its checkpoint, and its status until the
end.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    NOW,
    Row,
    Want,
    ago,
    check,
    ended,
    going,
    job,
    last_words,
    progress,
    ready,
    run,
    running,
    seen,
    settled,
    stamp,
    status,
)
from zerotrain.operator.reconcile import DeletePods, DeleteWorkers, Observed, RequestYield, YieldState

pytestmark = pytest.mark.unit


PHASES = {"Suspend": "Suspending", "QueueEviction": "Suspending", "Drain": "Yielding", "Resize": "Yielding"}
MOVES = ("Drain", "Resize")
ACKED = YieldState(attempt=1, acked_at=ago(9))
YIELD = RequestYield(attempt=1, pod="gpt-1-0", pod_ip="10.0.0.0")
KILL = (DeleteWorkers(attempt=1, grace_s=1),)
ANSWERED = {"yieldRequest": None, "checkpoint.requestedAt": None}
HOUR = 3600.0
VOLUME = {"volume": {"persistentVolumeClaim": {"claimName": "ckpt"}}, "gracePeriodSeconds": 60}


def asked(
    reason: str = "Suspend",
    *,
    s_ago: float = 10,
    spec: dict[str, Any] | None = None,
    joined: bool = True,
    saved: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return a job that was asked to stop so long ago; `saved` is its newest checkpoint."""
    request = {"reason": reason, "requestedAt": stamp(ago(s_ago)), "message": "why", "joined": joined}
    checkpoint: dict[str, Any] = {"requestedAt": stamp(ago(s_ago)), **({"last": saved} if saved else {})}
    kept = {"yieldRequest": request, "checkpoint": checkpoint, **more}
    return job(
        spec={"suspend": reason == "Suspend", **(spec or {})}, status=status(PHASES[reason], 1, **kept)
    )


def at(step: int, *, s_ago: float = 3) -> dict[str, Any]:
    """Return a durable checkpoint of the attempt."""
    return {"step": step, "time": stamp(ago(s_ago)), "attempt": 1, "durable": True}


def row(name: str, what: dict[str, Any], observed: Observed, want: Want) -> Row:
    return Row(id=name, job=what, seen=observed, want=want)


VERIFIED = {"state": "Verified", "step": 100, "startTime": stamp(ago(5))}

DONE = [
    *(
        row(
            f"{reason}: what is complete was not asked for anything",
            asked(reason, saved=at(100, s_ago=HOUR)),
            seen(ended(0, 0), ended(1, 0), yielding=ACKED),
            Want(
                phase="Completed",
                fields=ANSWERED,
                conditions={"CheckpointDurable": ("True", "CheckpointDurable")},
            ),
        )
        for reason in PHASES
    ),
    *(
        row(
            f"{phase} with a request that an earlier operator left",
            job(
                status=status(
                    phase,
                    completionTime=stamp(ago(5)),
                    checkpoint={"requestedAt": stamp(ago(60)), "last": at(100, s_ago=70), **more},
                )
            ),
            seen(ended(0, 0), ended(1, 0)),
            Want(phase=phase, conditions={"CheckpointDurable": ("True", reason)}),
        )
        for phase, more, reason in (
            ("Completed", {}, "CheckpointDurable"),
            ("Completed", {"verification": VERIFIED}, "CheckpointVerified"),
            ("Failed", {}, "CheckpointDurable"),
        )
    ),
    row(
        "nor does one without any checkpoint wait for one",
        job(status=status("Completed", checkpoint={"requestedAt": stamp(ago(60))})),
        seen(ended(0, 0), ended(1, 0)),
        Want(conditions={"CheckpointDurable": ("False", "NoCheckpoint")}),
    ),
]

LIMITED = {"runPolicy": {"activeDeadlineSeconds": 600}}
NEAR_DEADLINE = {"runPolicy": {"activeDeadlineSeconds": 605}}

DEADLINE = [
    *(
        row(
            f"{reason}: at the deadline nobody waits for a checkpoint",
            asked(reason, spec=LIMITED),
            seen(ready(0), ready(1), yielding=ACKED),
            Want(
                phase="Failed",
                events=("DeadlineExceeded",),
                actions=(DeletePods(names_uids=(("gpt-1-0", "pod-1-0"), ("gpt-1-1", "pod-1-1")), grace_s=1),),
                fields=ANSWERED,
            ),
        )
        for reason in MOVES
    ),
    *(
        row(
            f"{reason}: until then it is waited for, and no longer",
            asked(reason, spec=NEAR_DEADLINE),
            seen(ready(0), ready(1), yielding=ACKED),
            Want(phase="Yielding", actions=(), wake_in_s=5),
        )
        for reason in MOVES
    ),
    row(
        "all ranks succeeded in the same moment",
        asked("Drain", spec=LIMITED),
        seen(ended(0, 0), ended(1, 0), yielding=ACKED),
        Want(phase="Completed"),
    ),
    *(
        row(
            f"{reason}: time suspended or queued is not the job's own",
            asked(reason, spec=LIMITED),
            seen(ready(0), ready(1), yielding=ACKED),
            Want(phase="Suspending", actions=()),
        )
        for reason in ("Suspend", "QueueEviction")
    ),
]

PERIODIC = replace(progress(42, saved=40), heartbeat_at=NOW.timestamp())
UNANSWERED = {"CheckpointDurable": ("False", "CheckpointRequested")}

DURABLE = [
    *(
        row(
            f"{reason}: a periodic checkpoint of after the request is not the last one, at step {step}",
            asked(reason, saved=at(40)),
            seen(ready(0), ready(1), yielding=ACKED, progress=replace(PERIODIC, step=step)),
            Want(phase=PHASES[reason], conditions=UNANSWERED, messages={"CheckpointDurable": "step 40"}),
        )
        for reason in PHASES
        for step in (40, 42)  # the ranks make steps that are not reported yet
    ),
    row(
        "ranks that may not save on SIGTERM yield all the same",
        asked(
            saved=at(40),
            progress={"attempt": 1, "step": 42},
            spec={"checkpoint": {**VOLUME, "onTermination": False}},
        ),
        seen(ended(0, 75, termination=last_words(75, step=40)), ended(1, 75), yielding=ACKED),
        Want(phase="Suspending", actions=KILL, conditions=UNANSWERED),
    ),
    row(
        "the last one is",
        asked(saved=at(40), progress={"attempt": 1, "step": 42}),
        seen(ended(0, 75, termination=last_words(75, step=42)), ready(1), yielding=ACKED),
        Want(phase="Suspending", conditions={"CheckpointDurable": ("True", "CheckpointDurable")}),
    ),
]

STEP = progress(90, saved=40)

MET = [
    *(
        row(
            f"{reason}: ranks that met and train by now are asked as any others, with a clock of their own",
            asked(reason, joined=False, s_ago=HOUR),
            seen(ready(0), ready(1), progress=reported),
            Want(
                phase=PHASES[reason],
                actions=(YIELD,),
                fields={
                    "yieldRequest.joined": True,
                    "yieldRequest.requestedAt": stamp(NOW),
                    "checkpoint.requestedAt": stamp(NOW),
                },
                wake_in_s=2,
            ),
        )
        for reason in PHASES
        for reported in (
            STEP,
            None,
        )  # the first pass of an operator comes before the first answer of a worker
    ),
    row(
        "what takes their pods away leaves them the grace",
        asked("Drain", joined=False, s_ago=HOUR),
        seen(going(0, asked_s_ago=5), going(1, asked_s_ago=5)),
        Want(phase="Yielding", actions=(), fields={"yieldRequest.joined": True}, wake_in_s=60),
    ),
    row(
        "their failure is their own",
        asked("Drain", joined=False, s_ago=HOUR),
        seen(ended(0, 1), ready(1), progress=STEP),
        Want(phase="Restarting", events=("RankFailed",), fields={"restarts.app": 1}),
    ),
    row(
        "those that have not met are ended",
        asked("Drain", joined=False, s_ago=HOUR),
        seen(running(0), running(1)),
        Want(phase="Yielding", actions=KILL, fields={"yieldRequest.joined": False}),
    ),
    row(
        "those that met while they were being ended are",
        asked("Drain", joined=False, s_ago=2),
        seen(going(0, grace_s=1), going(1, grace_s=1)),
        Want(phase="Yielding", fields={"yieldRequest.joined": False}),
    ),
]


def over_time(**spec: Any) -> dict[str, Any]:
    return asked(s_ago=100, spec=spec)


LATE = YieldState(attempt=1, acked_at=ago(95))

SAID = [
    row(
        name,
        over_time(checkpoint=checkpoint),
        seen(ready(0), ready(1), yielding=LATE),
        Want(actions=KILL, events=("YieldTimeout",), messages={"event": text}),
    )
    for name, checkpoint, text in (
        (
            "the grace was too short",
            VOLUME,
            "no checkpoint within 60 s: the pods are deleted; "
            "raise checkpoint.gracePeriodSeconds above one step plus one checkpoint",
        ),
        (
            "there is no checkpoint to give a grace to",
            None,
            "the ranks did not stop within 30 s: the pods are deleted; "
            "nothing would have been saved: recreate the job with spec.checkpoint",
        ),
        (
            "none was to be written",
            {**VOLUME, "onTermination": False},
            "the ranks did not stop within 60 s: the pods are deleted; "
            "raise checkpoint.gracePeriodSeconds above one step",
        ),
    )
]


def held_off(**more: Any) -> dict[str, Any]:
    """Return a job that is suspended after a failure, before its next attempt."""
    due = stamp(NOW + timedelta(seconds=60))
    return job(spec={"suspend": True}, status=status("Restarting", nextAttemptTime=due, **more))


HELD_OFF = [
    (
        "steps were lost",
        {"progress": {"attempt": 1, "step": 90}, "checkpoint": {"last": at(20)}},
        "Warning",
        "the newest checkpoint is step 20, the job was at step 90",
    ),
    ("nothing was saved", {"progress": {"attempt": 1, "step": 90}}, "Warning", "there is no checkpoint"),
    (
        "nothing was lost",
        {"progress": {"attempt": 1, "step": 20}, "checkpoint": {"last": at(20)}},
        "Normal",
        "no attempt starts until spec.suspend is false",
    ),
    ("nothing was done", {}, "Normal", "no attempt starts until spec.suspend is false"),
]


@pytest.mark.parametrize("item", [*DONE, *DEADLINE, *DURABLE, *MET, *SAID], ids=lambda item: item.id)
def test_row(item: Row) -> None:
    check(item)


@pytest.mark.parametrize(
    ("name", "stored", "kind", "text"), [pytest.param(*item, id=item[0]) for item in HELD_OFF]
)
def test_suspended_between_two_attempts(name: str, stored: dict[str, Any], kind: str, text: str) -> None:
    plan, after = run(row(name, held_off(**stored), seen(), Want()))
    assert after["phase"] == "Suspended"
    (event,) = plan.events
    assert (event.reason, event.type) == ("Suspended", kind)
    assert text in event.message


def test_the_renewed_clock_runs_on() -> None:
    stored = settled(asked("Drain", joined=False, s_ago=HOUR), seen(ready(0), ready(1)))
    later = NOW + timedelta(seconds=11)
    want = Want(
        actions=(DeleteWorkers(attempt=1, grace_s=None, ended=False),),
        fields={"yieldRequest.requestedAt": stamp(NOW)},
    )
    check(Row(id="sigterm", job=stored, seen=seen(ready(0), ready(1)), want=want, now=later))
