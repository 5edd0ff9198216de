"""Slots for creating pods: every job gets one in the end, and a large job does not delay the others."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.operator.reconcile_builders import pending, seen
from zerotrain.operator.controller.beginnings import has_begun, pods_to_create
from zerotrain.operator.controller.config import OperatorConfig
from zerotrain.operator.controller.starts import (
    LARGE,
    MAX_LARGE,
    MAX_LARGE_OF_ONE,
    MAX_STARTS,
    MAX_STARTS_OF_ONE,
    TIGHT_S,
    StartLines,
    Starts,
)
from zerotrain.operator.reconcile import CreateWorkers, Plan

pytestmark = pytest.mark.unit


def enters(starts: Starts[str], keys: str) -> list[bool]:
    return [starts.enter(key, pods=4) for key in keys]


def test_who_has_no_place_is_called_in_the_order_of_asking() -> None:
    starts = Starts[str](limit=2)
    assert enters(starts, "abcdc") == [True, True, False, False, False]
    assert starts.leave("c") == []  # its own pass, which was sent away, is over
    assert starts.leave("b") == ["c"]
    assert enters(starts, "xc") == [False, True], "the place of who was called is kept"
    assert starts.leave("a") == ["d"]
    assert starts.leave("c") == ["x"]


def test_a_place_that_is_not_taken_up_goes_to_the_next() -> None:
    starts = Starts[str](limit=1)
    assert enters(starts, "abc") == [True, False, False]
    assert starts.leave("a") == ["b"]
    assert starts.leave("b") == ["c"]  # suspended meanwhile: its pass created nothing
    assert enters(starts, "c") == [True]


def test_all_places_come_back() -> None:
    starts = Starts[str](limit=1)
    assert enters(starts, "abc") == [True, False, False]
    assert starts.leave("a") == ["b"]
    assert enters(starts, "b") == [True]
    assert starts.leave("b") == ["c"]
    assert enters(starts, "c") == [True]
    assert starts.leave("c") == []
    assert enters(starts, "z") == [True]


def test_who_creates_nothing_needs_no_place() -> None:
    starts = StartLines(Starts[str](limit=1))
    assert starts.enter("a", pods=1)
    assert starts.enter("done", pods=0)
    assert not starts.enter("b", pods=LARGE)
    assert starts.leave("done") == []
    assert starts.leave("a") == ["b"]


def test_large_jobs_and_small_ones_do_not_wait_for_each_other() -> None:
    starts = StartLines(Starts[str](limit=1))
    assert starts.enter("a", pods=1)
    assert starts.enter("large", pods=LARGE + 1)
    assert not starts.enter("b", pods=LARGE)
    assert starts.leave("large") == []
    assert starts.leave("a") == ["b"]


def test_the_small_jobs_of_a_namespace_that_hangs_leave_places_to_others() -> None:
    """No pass ends behind a webhook that does not answer."""
    starts = Starts[str](namespace_of=lambda key: key[0], capacity=lambda _: 1000)
    entered = [starts.enter(f"a{number}", pods=4) for number in range(40)]
    assert sum(entered) == MAX_STARTS_OF_ONE
    assert starts.enter("b0", pods=4)
    assert starts.leave("a0") == [f"a{MAX_STARTS_OF_ONE}"], "in the order of asking"
    assert OperatorConfig().workers > MAX_STARTS + MAX_LARGE, "passes are left for what creates nothing"


def test_the_large_jobs_of_a_hanging_namespace_hold_a_limited_number_of_passes() -> None:
    """No request of the namespace is answered, so no pass ends there; more jobs come than the operator has
    passes.
    """
    starts = StartLines[str](namespace_of=lambda key: key[0])
    names = [f"a{number}" for number in range(40)] + ["b0", "c0"]
    inside = [name for name in names if starts.enter(name, pods=1000)]
    assert inside == [*names[:MAX_LARGE_OF_ONE], "b0", "c0"]
    assert starts.leave("a0") == [f"a{MAX_LARGE_OF_ONE}"], "in the order of asking"
    assert starts.enter(f"a{MAX_LARGE_OF_ONE}", pods=1000)


def test_all_namespaces_together_leave_passes_for_everything_else() -> None:
    starts = StartLines[str](namespace_of=lambda key: key[0])
    names = [f"{tenant}{number}" for tenant in "abcdefghijklm" for number in range(MAX_LARGE_OF_ONE)]
    assert sum(starts.enter(name, pods=1000) for name in names) == MAX_LARGE < OperatorConfig().workers / 2


def test_two_large_attempts_of_a_namespace_do_not_interleave() -> None:
    starts = StartLines[str](namespace_of=lambda key: key[0])
    assert [starts.enter(name, pods=40) for name in ("a0", "a1", "b0")] == [True, False, True]
    starts.stay("a0")
    assert starts.leave("a0") == []
    assert not starts.enter("a1", pods=40), "the first 37 of a0 exist, and the last 3 do not"
    assert starts.enter("a0", pods=3, begun=True)
    assert not starts.enter("a1", pods=40)
    assert starts.leave("a0") == ["a1"]
    assert starts.enter("a1", pods=40)


def test_nor_do_small_ones_where_the_api_server_refused_some_a_while_ago() -> None:
    now = [0.0]
    starts = StartLines[str](namespace_of=lambda key: key[0], clock=lambda: now[0])
    assert [starts.enter(name, pods=8) for name in ("a0", "a1")] == [True, True]
    starts.refused("a0")
    assert [starts.leave(name) for name in ("a0", "a1")] == [[], []]
    assert [starts.enter(name, pods=8) for name in ("a0", "a1", "b0", "b1")] == [True, False, True, True]
    assert starts.enter("a2", pods=1), "one pod is never a part"
    assert starts.leave("a0") == ["a1"], "who was refused once more has left as well: it stops nobody"
    assert starts.enter("a1", pods=8)
    assert starts.leave("a1") == []
    now[0] = TIGHT_S
    assert [starts.enter(name, pods=8) for name in ("a0", "a1")] == [True, True], "it is long ago"


def test_a_new_job_is_queued_without_a_pass_and_keeps_its_place() -> None:
    starts = Starts[str](limit=1)
    assert not starts.stand("a"), "there is a place"
    assert enters(starts, "a") == [True]
    assert starts.stand("b")
    assert starts.stand("c")
    assert starts.leave("a") == ["b"]
    assert not starts.stand("b"), "it was called"
    assert starts.stand("x"), "the place of who was called is kept"
    assert enters(starts, "b") == [True]
    assert starts.leave("b") == ["c"]


def test_who_goes_on_in_the_next_pass_keeps_its_place() -> None:
    starts = Starts[str](limit=1)
    assert enters(starts, "ab") == [True, False]
    starts.stay("a")
    assert starts.leave("a") == []
    assert enters(starts, "a") == [True]
    assert starts.leave("a") == ["b"], "it stayed for one pass"
    starts.stay("a")  # without a slot, as for a large job
    assert enters(starts, "b") == [True]
    assert starts.leave("a") == []
    assert starts.leave("b") == []
    assert not starts.stand("c")


def test_who_has_pods_already_goes_on_before_all_that_have_none() -> None:
    starts = Starts[str](limit=1)
    assert enters(starts, "ab") == [True, False]
    assert starts.enter("large", pods=20, begun=True), "the last pods of a thousand"
    assert starts.leave("a") == [], "it has a place like others"
    assert starts.leave("large") == ["b"]


def test_a_limited_number_of_large_jobs_or_many_small_ones_begin_together() -> None:
    capacity = 16
    starts = Starts[str](least=2, capacity=lambda _: capacity)
    assert enters(starts, "abcde") == [True, True, True, True, False]
    assert starts.leave("a") == ["e"]
    assert starts.enter("e", pods=12)
    assert not starts.enter("f", pods=4)
    assert starts.leave("b") == [], "20 pods of c, d and e"
    assert starts.leave("c") == [], "16 of d and e"
    assert starts.leave("e") == ["f"]
    capacity = 8
    assert starts.enter("f", pods=4)
    assert not starts.enter("g", pods=1), "the API server became slower meanwhile"


def test_those_who_were_called_are_taken_to_be_like_the_last() -> None:
    starts = Starts[str](least=2, capacity=lambda _: 25)
    assert [starts.enter(key, pods=10) for key in "abcdef"] == [True, True, True, False, False, False]
    assert starts.leave("a") == ["d"]
    assert starts.leave("b") == ["e"], "10 of c and 10 that d may have"
    assert starts.leave("x") == []


def test_a_job_of_many_pods_is_never_alone() -> None:
    starts = Starts[str](least=2, capacity=lambda _: 16)
    assert [starts.enter(key, pods=24) for key in "abc"] == [True, True, False]


def test_a_slow_namespace_keeps_no_other_waiting() -> None:
    """Every creation of one tenant waits for a webhook that hangs; no creation of the other does."""
    starts = Starts[str](
        8, least=2, namespace_of=lambda key: key[0], capacity=lambda namespace: 8 if namespace == "a" else 80
    )
    names = ["a1", "a2", "a3", "a4", "b1", "b2", "b3", "b4", "b5", "b6", "b7"]
    assert [name for name in names if starts.enter(name, pods=10)] == [
        "a1",
        "a2",
        "b1",
        "b2",
        "b3",
        "b4",
        "b5",
        "b6",
    ]
    assert starts.leave("b1") == ["b7"]
    assert starts.leave("a1") == ["a3"]


@pytest.mark.parametrize("pods", [4, 1000], ids=["small", "large"])
def test_namespaces_whose_passes_take_long_have_no_places_of_others(pods: int) -> None:
    """A webhook hangs in as many namespaces as there are slots."""
    starts = StartLines[str](namespace_of=lambda key: key[0])
    slow = [f"{tenant}{number}" for tenant in "ABCDEFGHIJKLMNOP" for number in range(MAX_STARTS_OF_ONE + 4)]
    inside = [name for name in slow if starts.enter(name, pods=pods)]
    assert not starts.enter("z0", pods=pods), "all places are taken"
    called = list[str]()
    for name in inside:  # grows by those that are called
        assert name in called or starts.enter(name, pods=pods)
        following = starts.late(name)
        called += following
        inside += [other for other in following if other != "z0" and starts.enter(other, pods=pods)]
    assert "z0" in called
    of_one = MAX_STARTS_OF_ONE if pods == 4 else MAX_LARGE_OF_ONE
    assert set(Counter(name[0] for name in inside).values()) == {of_one}, "each keeps to its own bound"
    assert starts.enter("y0", pods=pods)


def test_places_of_a_namespace_count_again_when_its_passes_are_over() -> None:
    starts = Starts[str](limit=2, namespace_of=lambda key: key[0])
    assert [starts.enter(key, pods=4) for key in ("a0", "a1", "b0")] == [True, True, False]
    assert starts.late("a0") == ["b0"], "nor does the other one of its namespace count"
    assert [starts.enter(key, pods=4) for key in ("b0", "c0")] == [True, True]
    assert not starts.enter("d0", pods=4), "b0 and c0"
    assert starts.leave("a0") == []
    assert starts.leave("b0") == [], "a1 and c0"
    assert starts.leave("a1") == ["d0"]


def test_namespaces_alternate() -> None:
    starts = Starts[str](limit=1, namespace_of=lambda key: key[0])
    assert starts.enter("z0", pods=1)
    for name in ("a1", "a2", "a3", "b1", "c1"):
        assert not starts.enter(name, pods=1)
    called, order = starts.leave("z0"), []
    while called:
        order += called
        assert starts.enter(called[0], pods=1)
        called = starts.leave(called[0])
    assert order == ["a1", "b1", "c1", "a2", "a3"]


def test_a_large_job_that_has_begun_comes_before_those_that_have_not() -> None:
    """The pods of a begun job hold nodes; but an operator that starts anew may find many such jobs."""
    starts = StartLines[str]()
    assert starts.enter("job", pods=1000, begun=True)
    assert not starts.enter("new", pods=1000)
    assert not starts.enter("half", pods=500, begun=True)
    assert starts.leave("job") == ["half"]
    assert starts.enter("half", pods=500, begun=True)
    assert starts.leave("half") == ["new"]


def test_who_is_gone_stands_in_no_line() -> None:
    starts = StartLines(Starts[str](limit=1))
    assert starts.enter("a", pods=1)
    assert not starts.enter("gone", pods=1)
    assert not starts.enter("b", pods=1)
    starts.forget("gone")
    starts.forget("never seen")
    assert starts.leave("a") == ["b"]


def test_only_pods_that_a_plan_creates_stand_in_line() -> None:
    there = seen(pending(0), pending(1))
    creating = Plan(actions=(CreateWorkers(attempt=1, indices=(2, 3, 4)),))
    assert [pods_to_create(plan) for plan in (creating, Plan())] == [3, 0]
    assert [has_begun(plan, there) for plan in (creating, Plan())] == [True, False]
