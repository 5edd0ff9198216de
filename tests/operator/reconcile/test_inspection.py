"""Choice of the rank to blame when no rank moves: the surest difference counts, and without one there is
none.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.operator.reconcile_builders import NOW
from zerotrain.contract.progress import Motion, Phase, Progress
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.reconcile.inspection import inspect

pytestmark = pytest.mark.unit


def rank(number: int, *, idle_s: float = 400, silent_s: float = 2, **more: Any) -> Progress:
    """Return the record of a victim: alive at step 40, waiting in a collective."""
    fields = {"phase": Phase.STEP, "step": 40, "heartbeat_at": 1.0, "collective_wait_seconds": 390.0, **more}
    return Progress(
        rank=number, attempt=1, motion=Motion(idle_seconds=idle_s, silent_seconds=silent_s), **fields
    )


def workers(*ranks: Progress, each: int = 2) -> dict[int, WorkerReport | None]:
    return {
        index: WorkerReport(
            job="gpt",
            job_uid="u",
            attempt=1,
            node_rank=index,
            world_size=len(ranks),
            ranks=ranks[index * each : (index + 1) * each],
        )
        for index in range(len(ranks) // each)
    }


def before(number: int, phase: Phase, **more: Any) -> Progress:
    """Return the record of a rank without a step, for which the engine does not know yet how long it
    waits.
    """
    return rank(number, **{"phase": phase, "step": 0, "collective_wait_seconds": None, **more})


def ended(number: int, **more: Any) -> Progress:
    """Return the record of a rank that has reported its end, and whose process is gone."""
    record = rank(number, **{"phase": Phase.DONE, "collective_wait_seconds": 0.0, **more})
    return replace(record, motion=Motion(idle_seconds=400, silent_seconds=0, ended_seconds=399))


VICTIMS = [rank(number) for number in range(6)]


def with_outlier(number: int, **more: Any) -> dict[int, WorkerReport | None]:
    return workers(*(rank(n, **more) if n == number else VICTIMS[n] for n in range(6)))


CASES: list[tuple[str, dict[int, WorkerReport | None], int | None, str]] = [
    ("its process is stopped", with_outlier(3, silent_s=300), 3, "its process reports nothing"),
    ("its step is behind", with_outlier(3, step=39), 3, "it is at step 39 while others are at step 40"),
    (
        "it is still in the checkpoint",
        with_outlier(5, phase=Phase.CHECKPOINT),
        5,
        "in phase checkpoint while others",
    ),
    (
        "it computes, sleeps or reads data",
        with_outlier(4, collective_wait_seconds=0.0),
        4,
        "does not wait in a coll",
    ),
    (
        "it builds its model while others wait for it",
        workers(*(before(n, Phase.INIT if n == 4 else Phase.RENDEZVOUS) for n in range(6))),
        4,
        "has not joined the rendezvous in which others wait",
    ),
    (
        "so with as many who wait",
        workers(*(before(n, Phase.INIT if n > 1 else Phase.RENDEZVOUS) for n in range(4))),
        2,
        "has not joined the rendezvous",
    ),
    (
        "it is stopped before the rendezvous",
        workers(*(before(n, Phase.RENDEZVOUS) for n in range(3)), before(3, Phase.INIT, silent_s=200)),
        3,
        "its process reports nothing",
    ),
    (
        "those that came through the rendezvous are not late",
        workers(
            *(before(n, Phase.RENDEZVOUS) for n in (0, 1)),
            *(before(n, Phase.INIT, collective_wait_seconds=50.0) for n in (2, 3)),
        ),
        None,
        "",
    ),
    ("nobody has come yet", workers(*(before(n, Phase.INIT) for n in range(4))), None, ""),
    ("nobody differs", workers(*VICTIMS), None, ""),
    ("nobody knows who waits", workers(*(rank(n, collective_wait_seconds=None) for n in range(6))), None, ""),
    ("all are busy", workers(*(rank(n, collective_wait_seconds=0.0) for n in range(6))), None, ""),
    (
        "it hangs in its teardown when all others have ended",
        workers(*(ended(n) for n in (0, 1, 2)), rank(3, phase=Phase.DONE, collective_wait_seconds=0.0)),
        3,
        "its process still runs, while those of others have ended",
    ),
    (
        "so of two ranks, and of a program that knows nothing of waits",
        workers(ended(0), rank(1, phase=Phase.DONE, collective_wait_seconds=None)),
        1,
        "its process still runs",
    ),
    (
        "it is stopped when all others have ended",
        workers(*(ended(n) for n in (0, 1, 2)), rank(3, silent_s=300)),
        3,
        "its process reports nothing",
    ),
    ("those that are left wait for one that ended", workers(ended(0), *VICTIMS[1:]), None, ""),
    (
        "most are left: they are judged by each other",
        workers(ended(0, step=7), *VICTIMS[1:5], rank(5, step=39)),
        5,
        "it is at step 39 while others are at step 40",
    ),
    ("all have ended", workers(*(ended(n, step=n) for n in range(4))), None, ""),
    ("its launcher is mute", {**workers(*VICTIMS), 1: None}, 2, "its pod does not answer"),
    ("two launchers are mute", {**workers(*VICTIMS), 1: None, 2: None}, 2, "as 1 other pods"),
    (
        "a whole node is silent",
        workers(*(rank(n, silent_s=300 if n in (2, 3) else 2) for n in range(6))),
        2,
        "as 1 other ranks",
    ),
    (
        "silence is surer than the step",
        workers(rank(0, step=39), rank(1), rank(2, silent_s=300), rank(3), rank(4), rank(5)),
        2,
        "its process reports nothing",
    ),
    (
        "half and half: the phase accuses nobody",
        workers(*(rank(n, phase=Phase.CHECKPOINT if n % 2 else Phase.STEP) for n in range(6))),
        None,
        "",
    ),
]


@pytest.mark.parametrize(
    ("answers", "accused", "why"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_accused(answers: dict[int, WorkerReport | None], accused: int | None, why: str) -> None:
    found = inspect(answers, attempt=1, at=NOW).slow_rank
    assert (found.rank if found else None) == accused
    if found is not None:
        assert found.worker == found.rank // 2
        assert why in found.why


def test_the_rank_that_moved_last_and_the_slowest_pace_count() -> None:
    slow = replace(VICTIMS[0], motion=Motion(idle_seconds=500, silent_seconds=1, step_p99_seconds=30))
    fast = replace(VICTIMS[1], motion=Motion(idle_seconds=70, silent_seconds=1, longest_step_seconds=44))
    saving = replace(
        VICTIMS[2],
        phase=Phase.CHECKPOINT,
        motion=Motion(idle_seconds=90, silent_seconds=1, longest_checkpoint_seconds=12, step_p99_seconds=7),
    )
    paces = inspect(workers(slow, fast, saving, saving), attempt=1, at=NOW).paces
    assert (paces[Phase.STEP].idle_s, paces[Phase.STEP].usual_s, paces[Phase.STEP].longest_s) == (70, 30, 44)
    assert (paces[Phase.CHECKPOINT].idle_s, paces[Phase.CHECKPOINT].usual_s) == (90, 12)


def test_ranks_that_have_ended_say_nothing_of_how_long_the_others_may_stand_still() -> None:
    saved = ended(0, phase=Phase.CHECKPOINT)
    assert list(inspect(workers(saved, *VICTIMS[1:]), attempt=1, at=NOW).paces) == [Phase.STEP]
    assert list(inspect(workers(saved, ended(1)), attempt=1, at=NOW).paces), "all have: their launcher hangs"


def test_warm_up_lasts_until_every_rank_has_made_enough_steps() -> None:
    motions = [
        Motion(idle_seconds=1, silent_seconds=1, steps_seen=steps_seen, first_step_seconds=first_s)
        for steps_seen, first_s in ((10, 30), (9, 44), (10, None), (10, math.inf))
    ]
    early = [replace(record, motion=motion) for record, motion in zip(VICTIMS[:4], motions, strict=True)]
    pace = inspect(workers(*early), attempt=1, at=NOW).paces[Phase.STEP]
    assert (pace.warms_up, pace.first_s) == (True, 44)
    late = [replace(record, motion=motions[2]) for record in early]
    pace = inspect(workers(*late), attempt=1, at=NOW).paces[Phase.STEP]
    assert (pace.warms_up, pace.first_s) == (False, None)


def test_records_that_cannot_be_do_not_count() -> None:
    other_attempt = replace(VICTIMS[0], attempt=2)
    of_another_worker = replace(VICTIMS[1], rank=3, step=9)
    never_reported = replace(VICTIMS[2], motion=None)
    look = inspect(
        workers(other_attempt, of_another_worker, never_reported, never_reported), attempt=1, at=NOW
    )
    assert (look.paces, look.slow_rank) == ({}, None)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_numbers_that_are_none_prove_no_hang(wrong: float) -> None:
    motion = Motion(
        idle_seconds=wrong, silent_seconds=wrong, step_p99_seconds=wrong, longest_step_seconds=wrong
    )
    look = inspect(workers(*(replace(record, motion=motion) for record in VICTIMS)), attempt=1, at=NOW)
    assert look.paces[Phase.STEP].idle_s == 0.0
    assert look.paces[Phase.STEP].usual_s is None
