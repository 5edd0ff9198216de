"""Slots for creating pods: every job gets one in the end, and a large job does not delay the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.operator.reconcile_builders import pending, seen
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.controller.config import OperatorConfig
from zerotrain.operator.controller.start_slots import (
    LARGE,
    MAX_LARGE,
    MAX_LARGE_OF_ONE,
    MAX_SMALL,
    MAX_SMALL_OF_ONE,
    QUIET_S,
    TIGHT_S,
    StartSlots,
    has_begun,
    pods_to_create,
)
from zerotrain.operator.reconcile import CreateWorkers, Plan

pytestmark = pytest.mark.unit


def job(name: str) -> JobKey:
    """Return the key of a job whose namespace is the first character of its name."""
    return JobKey(name[0], name)


def names(keys: Iterable[JobKey]) -> list[str]:
    return [key.name for key in keys]


class Slots(StartSlots):
    """Slots by names of jobs."""

    def takes(self, *jobs: str, pods: int = 4, begun: bool = False) -> list[str]:
        """Return which of the jobs may create."""
        return [name for name in jobs if self.enter(job(name), pods=pods, begun=begun)]

    def ends(self, name: str) -> list[str]:
        """Return which jobs get a slot at the end of the job's pass."""
        return names(self.leave(job(name)))


def filled(tenant: str = "a", *, large: bool = False) -> Slots:
    """Return slots of which the tenant has as many as it may, with its jobs `a-0`, `a-1` ..."""
    slots = Slots()
    number, pods = (MAX_LARGE_OF_ONE, LARGE + 1) if large else (MAX_SMALL_OF_ONE, 4)
    assert len(slots.takes(*(f"{tenant}-{n}" for n in range(number)), pods=pods)) == number
    return slots


def test_who_has_no_slot_gets_one_in_the_order_of_asking() -> None:
    slots = filled()
    assert slots.takes("ax", "ay", "ax") == []
    assert slots.ends("ax") == []  # its own pass, which was sent away, is over
    assert slots.ends("a-0") == ["ax"]
    assert slots.takes("az", "ax") == ["ax"], "its slot is kept"
    assert slots.ends("a-1") == ["ay"]
    assert slots.ends("ay") == ["az"], "it was suspended meanwhile: its pass created nothing"


def test_all_slots_come_back() -> None:
    slots, waiting = Slots(), [f"a{number}" for number in range(100)]
    running, done = slots.takes(*waiting), list[str]()
    while running:
        done.append(running.pop(0))
        running += slots.ends(done[-1])
    assert done == waiting
    assert slots.takes(*waiting) == waiting[:MAX_SMALL_OF_ONE]


def test_who_creates_nothing_needs_no_slot() -> None:
    slots = filled()
    assert slots.takes("a-done", pods=0) == ["a-done"]
    assert slots.takes("ax") == []
    assert slots.ends("a-done") == []
    assert slots.ends("a-0") == ["ax"]


def test_large_jobs_and_small_ones_do_not_wait_for_each_other() -> None:
    slots = filled()
    assert slots.takes("a-large", pods=LARGE + 1) == ["a-large"]
    assert slots.takes("ax", pods=LARGE) == []
    assert slots.ends("a-large") == []
    assert slots.ends("a-0") == ["ax"]


@pytest.mark.parametrize(
    ("pods", "of_one", "of_all"), [(4, MAX_SMALL_OF_ONE, MAX_SMALL), (1000, MAX_LARGE_OF_ONE, MAX_LARGE)]
)
def test_no_namespace_has_all_slots(pods: int, of_one: int, of_all: int) -> None:
    slots = Slots()
    assert len(slots.takes(*(f"a{number}" for number in range(40)), pods=pods)) == of_one < of_all
    assert slots.takes("b0", pods=pods) == ["b0"]


def test_all_namespaces_together_leave_passes_for_everything_else() -> None:
    slots, held = Slots(), 0
    for pods, of_all in ((1000, MAX_LARGE), (4, MAX_SMALL)):
        jobs = [f"{tenant}{number}{pods}" for tenant in "abcdefghijklm" for number in range(20)]
        held += (entered := len(slots.takes(*jobs, pods=pods)))
        assert entered == of_all
    assert held < OperatorConfig().workers


def test_two_large_attempts_of_a_namespace_do_not_interleave() -> None:
    slots = Slots()
    assert slots.takes("a0", "a1", "b0", pods=40) == ["a0", "b0"]
    slots.stay(job("a0"))
    assert slots.ends("a0") == []
    assert slots.takes("a1", pods=40) == [], "the first 37 of a0 exist, and the last 3 do not"
    assert slots.takes("a0", pods=3, begun=True) == ["a0"]
    assert slots.takes("a1", pods=40) == []
    assert slots.ends("a0") == ["a1"]
    assert slots.takes("a1", pods=40) == ["a1"]


def test_nor_do_small_ones_where_the_api_server_refused_some_a_while_ago() -> None:
    now = [0.0]
    slots = Slots(clock=lambda: now[0])
    assert slots.takes("a0", "a1", pods=8) == ["a0", "a1"]
    slots.refused(job("a0"))
    assert [slots.ends(name) for name in ("a0", "a1")] == [[], []]
    assert slots.takes("a0", "a1", "b0", "b1", pods=8) == ["a0", "b0", "b1"]
    assert slots.takes("a2", pods=1) == ["a2"], "one pod is never a part"
    assert slots.ends("a0") == ["a1"], "who was refused once more has left as well: it stops nobody"
    assert slots.ends("a1") == []
    now[0] = TIGHT_S
    assert slots.takes("a0", "a1", pods=8) == ["a0", "a1"], "it is long ago"


def test_who_goes_on_in_the_next_pass_keeps_its_slot() -> None:
    slots = filled()
    assert slots.takes("ax") == []
    slots.stay(job("a-0"))
    assert slots.ends("a-0") == []
    assert slots.takes("a-0") == ["a-0"]
    assert slots.ends("a-0") == ["ax"], "it stayed for one pass"
    slots.stay(job("ay"))  # without a slot
    assert slots.takes("ay") == []
    assert slots.ends("ax") == ["ay"]


@pytest.mark.parametrize("large", [False, True])
def test_who_has_pods_already_comes_before_those_that_have_none(large: bool) -> None:
    """Pods hold nodes; but an operator that starts anew may find many such jobs."""
    slots, pods = filled(large=large), LARGE + 1 if large else 4
    assert slots.takes("ax", pods=pods) == []
    assert slots.takes("ay", "az", pods=pods, begun=True) == []
    assert slots.ends("a-0") == ["ay"]
    assert slots.ends("ay") == ["az"]
    assert slots.ends("az") == ["ax"]


@pytest.mark.parametrize("pods", [4, 1000], ids=["small", "large"])
def test_namespaces_whose_passes_take_long_have_no_slots_of_others(pods: int) -> None:
    """A webhook hangs in as many namespaces as there are slots, in as many jobs as each may have."""
    late, tenants = set[str](), "ABCDEFGHIJKLMNOP"
    slots = Slots(lambda namespace: namespace in late)
    jobs = [f"{tenant}{number}" for tenant in tenants for number in range(MAX_SMALL_OF_ONE + 4)]
    inside = slots.takes(*jobs, pods=pods)
    assert slots.takes("z0", pods=pods) == [], "all slots are taken"
    for name in inside:  # grows by those that get slots
        late.add(name[0])
        inside += [key.name for key in slots.grant() if key.name != "z0"]
    assert slots.takes("z0", pods=pods) == ["z0"]
    of_one = MAX_SMALL_OF_ONE if pods == 4 else MAX_LARGE_OF_ONE
    assert Counter(name[0] for name in inside) == dict.fromkeys(tenants, of_one), "each keeps to its bound"
    assert slots.takes("y0", pods=pods) == ["y0"]


def test_slots_of_a_namespace_count_again_when_its_passes_are_over() -> None:
    late = {"a"}
    slots = Slots(lambda namespace: namespace in late)
    tenants = "abcdefgh"
    assert len(slots.takes(*(f"{tenant}0" for tenant in tenants), pods=1000)) == 1 + MAX_LARGE
    late.clear()
    assert slots.ends("b0") == [], "those of a, c, d and e"
    assert slots.ends("a0") == ["f0"]


def test_the_next_slot_is_for_the_namespace_that_has_the_fewest() -> None:
    slots = Slots()
    first = slots.takes(*(f"{tenant}{n}" for tenant in "ab" for n in range(MAX_SMALL_OF_ONE)))
    assert len(first) == MAX_SMALL
    assert slots.takes("a-8", "a-9", "b-8", "c-0", "c-1", "d-0") == []
    order = [name for ending in first[:6] for name in slots.ends(ending)]
    assert order == ["c-0", "d-0", "c-1", "a-8", "a-9"], "b has nothing but slots"


def test_who_is_gone_stands_in_no_line() -> None:
    slots = filled()
    assert slots.takes("ax", "ay") == []
    slots.forget(job("ax"))
    slots.forget(job("never seen"))
    assert slots.ends("a-0") == ["ay"]


@pytest.mark.parametrize("large", [False, True])
def test_who_waits_says_so_if_it_takes_long(large: bool) -> None:
    slots, now = filled(large=large), [0.0]
    slots._clock = lambda: now[0]
    assert slots.quiet_s(job("ax")) is None
    for now[0], rest_s in ((0.0, QUIET_S), (QUIET_S - 1, 1.0), (QUIET_S + 1, 0.0)):
        assert slots.takes("ax", pods=LARGE + 1 if large else 4) == []
        assert slots.quiet_s(job("ax")) == (0.0 if large else rest_s)
    assert slots.ends("a-0") == ["ax"]
    assert slots.quiet_s(job("ax")) is None


def test_only_pods_that_a_plan_creates_need_a_slot() -> None:
    there = seen(pending(0), pending(1))
    creating = Plan(actions=(CreateWorkers(attempt=1, indices=(2, 3, 4)),))
    assert [pods_to_create(plan) for plan in (creating, Plan())] == [3, 0]
    assert [has_begun(plan, there) for plan in (creating, Plan())] == [True, False]
