"""Connections that the worker's HTTP server accepts: no client can block another."""

from __future__ import annotations

import random

import pytest

from zerotrain.runtime.launch.http_slots import (
    ANSWER_S,
    KEPT_CONNECTIONS,
    MAX_CONNECTIONS,
    MAX_OF_ONE_PEER,
    MAX_TRUSTED_PEERS,
    REQUEST_S,
    Slots,
)

pytestmark = pytest.mark.unit


def test_one_peer_holds_a_share_and_displaces_its_own() -> None:
    slots: Slots[int] = Slots()
    displaced = [slots.admit(number, "a", 0.0).displaced for number in range(100)]
    assert len(slots) == MAX_OF_ONE_PEER
    assert displaced == [None] * MAX_OF_ONE_PEER + list(range(100 - MAX_OF_ONE_PEER))


def test_what_is_answered_is_displaced_last() -> None:
    slots: Slots[int] = Slots()
    for number in range(MAX_OF_ONE_PEER):
        slots.admit(number, "a", 0.0)
    slots.request_came(0, 0.0, trusted=False)
    assert [slots.admit(number, "a", 0.0).displaced for number in (100, 101)] == [1, 2]


def test_many_peers_do_not_keep_another_one_out() -> None:
    slots: Slots[tuple[str, int]] = Slots()
    for peer in range(MAX_CONNECTIONS // 4):
        for number in range(8):
            slots.admit((str(peer), number), str(peer), 0.0)
    admission = slots.admit(("prometheus", 0), "prometheus", 0.0)
    assert admission.admitted
    assert admission.displaced is not None
    assert admission.displaced[0] != "prometheus"
    # A client with a single connection keeps it while others hold more.
    for number in range(200):
        assert slots.admit(("0", 100 + number), "0", 0.0).displaced != ("prometheus", 0)


def test_the_token_is_never_displaced_and_its_address_has_slots_of_its_own() -> None:
    slots: Slots[tuple[str, int]] = Slots()
    slots.admit(("operator", 0), "operator", 0.0)
    slots.request_came(("operator", 0), 0.0, trusted=True)
    slots.release(("operator", 0))
    for peer in range(64):  # each with one connection, so that no peer holds more than others
        slots.admit((str(peer), 0), str(peer), 0.0)
    assert len(slots) == MAX_CONNECTIONS
    for number in range(KEPT_CONNECTIONS):
        admission = slots.admit(("operator", number), "operator", 0.0)
        assert admission.admitted
        assert admission.displaced is None
    for peer in range(64, 1000):
        displaced = slots.admit((str(peer), 0), str(peer), 0.0).displaced
        assert displaced is None or displaced[0] != "operator"
    assert len(slots) <= MAX_CONNECTIONS + KEPT_CONNECTIONS
    # Beyond its reserved slots it takes others' slots.
    admission = slots.admit(("operator", 99), "operator", 0.0)
    assert admission.admitted
    assert admission.displaced is not None
    assert admission.displaced[0] != "operator"


def test_the_token_from_the_address_of_a_slow_client_stays() -> None:
    """All clients have one address, as behind a gateway that hides addresses."""
    slots: Slots[int] = Slots()
    slots.admit(0, "node", 0.0)
    slots.request_came(0, 0.0, trusted=True)
    for number in range(1, 200):
        assert slots.admit(number, "node", 0.0).displaced != 0


def test_nor_does_the_oldest_answer_go_where_it_was_asked_for_with_the_token() -> None:
    """All come from one address, and all are answered."""
    slots: Slots[int] = Slots()
    for number in range(MAX_CONNECTIONS + KEPT_CONNECTIONS):
        assert slots.admit(number, "node", 0.0).displaced is None
        slots.request_came(number, 0.0, trusted=number == 0)
    assert slots.admit(100, "node", 0.0).displaced == 1


def test_a_stranger_takes_no_slot_of_an_address_that_the_token_came_from() -> None:
    slots: Slots[int] = Slots()
    for number in range(MAX_CONNECTIONS):
        slots.admit(number, "operator", 0.0)
        slots.request_came(number, 0.0, trusted=number == 0)
    admission = slots.admit(100, "stranger", 0.0)
    assert not admission.admitted
    assert len(slots) == MAX_CONNECTIONS


def test_deadlines_are_those_of_the_whole_request() -> None:
    slots: Slots[str] = Slots()
    slots.admit("slow", "a", 0.0)
    slots.admit("answered", "a", 0.0)
    slots.request_came("answered", 1.0, trusted=True)
    assert slots.overdue(REQUEST_S - 0.1) == []
    assert slots.overdue(REQUEST_S + 0.1) == ["slow"]
    assert slots.overdue(1.0 + ANSWER_S + 0.1) == ["answered"]
    assert len(slots) == 0


def test_addresses_that_are_trusted_are_bounded() -> None:
    slots: Slots[int] = Slots()
    for number in range(MAX_TRUSTED_PEERS * 4):
        slots.admit(number, f"peer {number}", 0.0)
        slots.request_came(number, 0.0, trusted=True)
        slots.release(number)
    assert len(slots._trusted) == MAX_TRUSTED_PEERS


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_numbers_hold(seed: int) -> None:
    chance = random.Random(seed)
    slots: Slots[int] = Slots()
    alive: set[int] = set()
    for number in range(2000):
        now = number / 10
        admission = slots.admit(number, f"peer {chance.randrange(40)}", now)
        if admission.admitted:
            alive.add(number)
        alive -= {admission.displaced}
        if alive and chance.random() < 0.3:
            slots.request_came(chance.choice(sorted(alive)), now, trusted=chance.random() < 0.05)
        if alive and chance.random() < 0.3:
            ended = chance.choice(sorted(alive))
            slots.release(ended)
            alive.remove(ended)
        alive -= set(slots.overdue(now))
        assert len(slots) == len(alive) <= MAX_CONNECTIONS + KEPT_CONNECTIONS
