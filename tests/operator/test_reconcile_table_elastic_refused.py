"""reconcile of elastic jobs whose pods the scheduler refuses although the count has room for them, and where
nobody may count: what was placed says how large the job is, and a job that runs is not stopped on a guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    NOW,
    Row,
    Want,
    ago,
    check,
    pending,
    restarts,
    seen,
    settled,
    stamp,
)
from tests.operator.test_reconcile_table_elastic import (
    ELASTIC,
    changed,
    elastic,
    placed,
    room,
    starting,
    team,
)
from tests.operator.test_reconcile_table_elastic_room import APIS, OURS, OVER_QUOTA, waiting
from zerotrain.operator.reconcile import AskRoom, DeleteWorkers, Observed, reconcile
from zerotrain.operator.reconcile.claims import Verdict

NO_NODE = "Unschedulable: 0/4 nodes are available: 1 node(s) had volume node affinity conflict."
STAYS: dict[str, Any] = {"elastic.workers": None, "elastic.losses": 0}
ALL = room(4, asked=4)


def refused(count: int, size: int, *, s_ago: float, attempt: int = 1, **more: Any) -> Observed:
    """`count` of the pods have a node; so long ago the scheduler said that there is none for the others."""
    said: dict[str, Any] = {"unscheduled_reason": NO_NODE, "refused_seen_at": ago(s_ago)}
    bound = [pending(index, attempt, scheduled=True) for index in range(count)]
    return seen(*bound, *(pending(index, attempt, **said) for index in range(count, size)), **more)


def of_eight(s_ago: float) -> dict[str, Any]:
    return changed(starting(8, s_ago=s_ago, wish=8, base=8), shape={"workers": 8})


EACH_POD_ALONE = [
    Row(
        id="the count has room, the scheduler has none: on with those that it placed",
        job=starting(4, s_ago=120),
        seen=refused(3, 4, s_ago=118, capacity=ALL),
        want=Want(
            phase="Yielding",
            events=("Resizing",),
            actions=(DeleteWorkers(attempt=1, grace_s=1), AskRoom(shape=None)),
            fields={"elastic.workers": 2, "elastic.losses": 1, "elastic.message": "room for 3 of 4 workers"},
            says={"event": "no room for 4 workers within 120 s: going on with 2"},
        ),
    ),
    Row(
        id="the count has room for a part, and the scheduler for less",
        job=of_eight(9000),
        seen=refused(3, 8, s_ago=8990, capacity=room(5, asked=8)),
        want=Want(phase="Yielding", fields={"elastic.workers": 2}),
    ),
    Row(
        id="the scheduler said no a moment ago: the count is believed for a minute",
        job=starting(4, s_ago=500),
        seen=refused(3, 4, s_ago=20, capacity=ALL),
        want=Want(phase="Pending", events=(), fields=STAYS, wake_in_s=40),
    ),
    Row(
        id="shrinkAfterSeconds are given in any case",
        job=starting(4, s_ago=110),
        seen=refused(3, 4, s_ago=108, capacity=ALL),
        want=Want(phase="Pending", events=(), fields=STAYS, wake_in_s=10),
    ),
    Row(
        id="a place that the scheduler makes free by preemption is one",
        job=of_eight(9000),
        seen=seen(
            *refused(3, 7, s_ago=8990).pods,
            pending(7, unscheduled_reason=NO_NODE),
            capacity=room(8, asked=8),
        ),
        want=Want(phase="Yielding", fields={"elastic.workers": 4}),
    ),
    Row(
        id="no pod was placed: those of a smaller attempt would not be either, and it goes by the count",
        job=starting(4, s_ago=9000),
        seen=refused(0, 4, s_ago=8990, capacity=ALL),
        want=Want(phase="Pending", events=(), fields=STAYS),
    ),
    Row(
        id="pods that a quota keeps out have no place beside those that the scheduler refuses",
        job=changed(starting(4, s_ago=9000), podsCreated=False),
        seen=refused(1, 2, s_ago=8990, problem=OVER_QUOTA, capacity=ALL),
        want=Want(phase="Yielding", fields={"elastic.workers": 1}),
    ),
    Row(
        id="pods that are being made wait for the others and not for nodes",
        job=changed(of_eight(9000), podsCreated=False),
        seen=refused(3, 4, s_ago=8990, capacity=room(8, asked=8), making=True),
        want=Want(phase="Pending"),
    ),
    Row(
        id="pods that a webhook keeps from being made are not refused by the scheduler",
        job=changed(of_eight(9000), podsCreated=False),
        seen=refused(3, 4, s_ago=8990, capacity=room(8, asked=8)),
        want=Want(
            phase="Yielding",
            fields={"elastic.workers": 4, "elastic.message": "room for 7 of 8 workers"},
        ),
    ),
]


def half(*seconds_ago: float, spec: Mapping[str, Any] = {}, last: int = 0, **state: Any) -> dict[str, Any]:
    """A gang that found nodes for a part of it, after attempts that ended so long ago and just as half bound;
    the last of them was number `last`."""
    past = restarts("preemption", *seconds_ago, reason="HalfBound", steps=(30,) * len(seconds_ago))
    number = 1 + (last or len(seconds_ago))
    stored = {"shape": {"workers": 4, "gang": "Operator"}, "attempt": number, "restarts": past}
    return changed(starting(4, s_ago=63, **state), {**OURS, **spec}, **stored)


def patient(seconds: int) -> dict[str, Any]:
    return {"elastic": {**ELASTIC, "shrinkAfterSeconds": seconds}}


SHRUNK = {"elastic.workers": 2, "elastic.losses": 1}
HALF_BOUND = [
    Row(
        id="half of a gang, for the first time: the same size asks for room anew",
        job=half(),
        seen=refused(3, 4, s_ago=61, capacity=ALL),
        want=Want(phase="Restarting", events=("HalfBound",), fields=STAYS),
    ),
    Row(
        id="once more, shrinkAfterSeconds after the first began: on with those that were placed, at once",
        job=half(65),
        seen=refused(3, 4, s_ago=61, attempt=2, capacity=ALL),
        want=Want(
            phase="Restarting",
            events=("HalfBound",),
            actions=(DeleteWorkers(attempt=2, grace_s=1), AskRoom(shape=None)),
            fields={
                **SHRUNK,
                "elastic.reason": "Capacity",
                "elastic.message": "room for 3 of 4 workers",
                "restarts.uncharged": 1,
                "nextAttemptTime": None,
            },
            says={"event": "attempt 3 asks for room anew with 2 of 4 workers"},
        ),
    ),
    Row(
        id="none of a gang that may not go everywhere, again and again: sizes are tried one by one",
        job=changed(half(65), shape={"workers": 4, "gang": "Operator", "avoidedNodes": ["big"]}),
        seen=refused(0, 4, s_ago=61, attempt=2, capacity=ALL),
        want=Want(
            phase="Restarting",
            fields=SHRUNK,
            says={"event": "attempt 3 asks for room anew with 2 of 4 workers"},
        ),
    ),
    Row(
        id="who is less patient goes on with them at the first time",
        job=half(spec=patient(30)),
        seen=refused(3, 4, s_ago=61),
        want=Want(phase="Restarting", fields=SHRUNK),
    ),
    Row(
        id="who is more patient: the same size again, after a hold-off",
        job=half(65, spec=patient(200)),
        seen=refused(3, 4, s_ago=61, attempt=2),
        want=Want(
            phase="Restarting",
            fields={**STAYS, "nextAttemptTime": stamp(ago(-5))},
            says={"event": "attempt 3 asks for room anew in 5 s"},
        ),
    ),
    Row(
        id="however patient: until that time is over",
        job=half(141, 65, spec=patient(200)),
        seen=refused(3, 4, s_ago=61, attempt=3),
        want=Want(phase="Restarting", fields=SHRUNK),
    ),
    Row(
        id="an attempt in between that had all its nodes: another wait",
        job=half(9000, last=2),
        seen=refused(3, 4, s_ago=61, attempt=3),
        want=Want(phase="Restarting", fields=STAYS),
    ),
    Row(
        id="suspended, stalled or in a queue for hours in between: another wait",
        job=half(8 * 3600, spec=patient(3600)),
        seen=refused(3, 4, s_ago=61, attempt=2),
        want=Want(phase="Restarting", fields=STAYS),
    ),
    Row(
        id="the same between earlier ones: that wait began after it",
        job=half(8 * 3600, 1000, 65, spec=patient(1100)),
        seen=refused(3, 4, s_ago=61, attempt=4),
        want=Want(phase="Restarting", fields=STAYS),
    ),
    Row(
        id="the longest hold-off, and pods that took a while to be made: still the same wait",
        job=half(800, 400, spec=patient(850)),
        seen=refused(3, 4, s_ago=61, attempt=3),
        want=Want(phase="Restarting", fields=SHRUNK),
    ),
    Row(
        id="a size that was decided on meanwhile is given its own time",
        job=half(65, since=stamp(ago(64))),
        seen=refused(3, 4, s_ago=61, attempt=2),
        want=Want(phase="Restarting", fields=STAYS),
    ),
    Row(
        id="not below minWorkers: the whole gang asks again and again",
        job=half(*range(2965, 0, -100), spec={"elastic": {"minWorkers": 4, "maxWorkers": 8}}),
        seen=refused(3, 4, s_ago=61, attempt=31),
        want=Want(phase="Restarting", fields={**STAYS, "nextAttemptTime": stamp(ago(-300))}),
    ),
    Row(
        id="the wish changed meanwhile: the next attempt has that size, and no room was lost",
        job=half(*range(2965, 0, -100), spec={"workers": 2}),
        seen=refused(3, 4, s_ago=61, attempt=31),
        want=Want(phase="Restarting", fields=STAYS),
    ),
]


def blind(workers: int, *, growing: bool = False) -> Verdict:
    """As an operator is told that may not list the pods of other namespaces."""
    fits = 0 if growing else workers
    return Verdict(admitted=not growing, workers=workers, fits=fits, counted=False, at=ago(1))


NOBODY_COUNTS = [
    Row(
        id="pods that find no node: on with those that did",
        job=starting(4, s_ago=120),
        seen=refused(2, 4, s_ago=60, capacity=blind(4)),
        want=Want(phase="Yielding", events=("Resizing",), fields=SHRUNK),
    ),
    Row(
        id="no pod finds a node: one size smaller",
        job=starting(4, s_ago=120),
        seen=refused(0, 4, s_ago=60, capacity=blind(4)),
        want=Want(phase="Yielding", fields=SHRUNK),
    ),
    Row(
        id="pods that were refused a moment ago may find one still",
        job=starting(4, s_ago=9000),
        seen=refused(2, 4, s_ago=20, capacity=blind(4)),
        want=Want(phase="Pending", events=(), fields=STAYS, wake_in_s=40),
    ),
    Row(
        id="all were refused a moment ago: the first of them may find one still",
        job=starting(4, s_ago=9000),
        seen=refused(0, 4, s_ago=20, capacity=blind(4)),
        want=Want(phase="Pending", events=(), fields=STAYS, wake_in_s=40),
    ),
    Row(
        id="pods that the scheduler has not looked at, or makes room for, are no lack of room",
        job=starting(4, s_ago=9000),
        seen=placed(0, 4, capacity=blind(4)),
        want=Want(phase="Pending", events=(), fields=STAYS),
    ),
    Row(
        id="nor are they beside some that it placed",
        job=of_eight(9000),
        seen=placed(3, 8, capacity=blind(8)),
        want=Want(phase="Pending", events=(), fields=STAYS),
    ),
    Row(
        id="pods behind our own gate, because a webhook keeps the last one from being made",
        job=changed(starting(4, s_ago=9000), podsCreated=False),
        seen=seen(*(pending(index, gated=True) for index in range(3)), capacity=blind(4)),
        want=Want(phase="Pending", events=(), fields=STAYS),
    ),
    Row(
        id="what a quota keeps out has no place here either",
        job=changed(starting(4, s_ago=9000), podsCreated=False),
        seen=seen(pending(0), pending(1), problem=OVER_QUOTA, capacity=blind(4)),
        want=Want(phase="Yielding", fields=SHRUNK),
    ),
    Row(
        id="the word that nobody may count is old: it is asked for again, and not taken for no answer",
        job=starting(4, s_ago=9000),
        seen=placed(0, 4, capacity=replace(blind(4), at=ago(31))),
        want=Want(phase="Pending", events=(), fields=STAYS, wake_in_s=15),
    ),
    Row(
        id="so is a count",
        job=starting(4, s_ago=9000),
        seen=placed(2, 4, capacity=replace(ALL, at=ago(31))),
        want=Want(phase="Pending", events=(), fields=STAYS, wake_in_s=15),
    ),
    Row(
        id="an operator that has only just begun to look asks first",
        job=starting(4, s_ago=9000),
        seen=placed(2, 4, synced_at=ago(5)),
        want=Want(phase="Pending", events=(), fields=STAYS, wake_in_s=25),
    ),
    Row(
        id="a gang waits for no count",
        job=waiting(OURS),
        seen=seen(apis=APIS, capacity=blind(4)),
        want=Want(phase="Pending", attempt=2, events=("Admitted",), fields={**STAYS, "shape.workers": 4}),
    ),
    Row(
        id="half of a gang, again: on with those that were placed",
        job=half(65),
        seen=refused(3, 4, s_ago=61, attempt=2, capacity=blind(4)),
        want=Want(phase="Restarting", fields=SHRUNK),
    ),
    Row(
        id="scaled up: the training goes on, and the user is told what to do",
        job=changed(elastic(2, wish=2), {"workers": 4}),
        seen=team(2, capacity=blind(4, growing=True)),
        want=Want(
            phase="Running",
            events=("ResizeRefused",),
            fields={"elastic.workers": 2, "elastic.reason": "Capacity", "elastic.wish": 4},
            says={"event": "room for 4 workers cannot be counted"},
        ),
    ),
    Row(
        id="suspended and resumed, as it was told: the wish is tried",
        job=changed(elastic(2, message="room for 4 workers cannot be counted"), phase="Suspended"),
        seen=seen(capacity=blind(4)),
        want=Want(phase="Pending", attempt=2, fields={"shape.workers": 4, "elastic.message": ""}),
    ),
    Row(
        id="shrunk: it stays as it is, and what was seen of room before is not forgotten",
        job=elastic(2, roomSince=stamp(ago(9000))),
        seen=team(2, capacity=blind(4, growing=True)),
        want=Want(phase="Running", events=(), fields={"elastic.roomSince": stamp(ago(9000))}),
    ),
    Row(
        id="shrunk, and by now the room may be counted: it grows",
        job=elastic(2, roomSince=stamp(ago(9000))),
        seen=team(2, capacity=ALL),
        want=Want(phase="Yielding", events=("Resizing",)),
    ),
]


@pytest.mark.parametrize("row", EACH_POD_ALONE, ids=lambda row: row.id)
def test_the_schedulers_word_goes_before_the_count(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", HALF_BOUND, ids=lambda row: row.id)
def test_half_of_a_gang_is_a_size(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", NOBODY_COUNTS, ids=lambda row: row.id)
def test_no_count_is_no_room_and_no_lack_of_it(row: Row) -> None:
    check(row)


def test_that_room_cannot_be_counted_is_told_once() -> None:
    observed = team(2, capacity=blind(4, growing=True))
    stays = settled(changed(elastic(2, wish=2), {"workers": 4}), observed)
    again = reconcile(stays, replace(observed, capacity=blind(4, growing=True)), NOW)
    assert again.events == ()
    assert again.status is None
