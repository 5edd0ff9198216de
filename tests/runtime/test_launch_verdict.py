"""Which rank is to blame, as a table: (how the ranks ended) -> (code, culprit)."""

from __future__ import annotations

import pytest

from zerotrain.runtime.launch.verdict import RankExit, decide, spoils


def ended(
    rank: int, status: int, at: float, *, reported: float | None = None, killed: bool = False
) -> RankExit:
    return RankExit(rank=rank, status=status, at=at, killed_by_launcher=killed, failure_reported_at=reported)


@pytest.mark.parametrize(
    ("exits", "code", "culprit"),
    [
        ([ended(0, 0, 1.0), ended(1, 0, 2.0)], 0, None),
        ([ended(0, 75, 1.0), ended(1, 75, 2.0)], 75, None),
        ([ended(0, 0, 1.0), ended(1, 75, 2.0)], 75, None),
        ([ended(0, 1, 2.0), ended(1, 7, 1.0)], 7, 1),
        ([ended(0, 75, 1.0), ended(1, 1, 2.0)], 1, 1),
        # The launcher's own SIGKILL blames nobody while somebody else failed.
        ([ended(0, -9, 6.0, killed=True), ended(1, 1, 1.0)], 1, 1),
        ([ended(0, -9, 6.0, killed=True), ended(1, -9, 1.0)], 137, 1),
        # The peer reports the lost connection before the parent of the killed rank hears of its end.
        ([ended(0, 1, 1.5, reported=1.0), ended(1, -9, 1.2)], 137, 1),
        ([ended(0, 1, 1.0), ended(1, -11, 1.2)], 139, 1),
        # A watchdog's abort may be the echo of a failure, so the times decide.
        ([ended(0, 1, 1.0), ended(1, -6, 1.2)], 1, 0),
        ([ended(0, 1, 1.2), ended(1, -15, 1.0)], 143, 1),
        # What the user must correct is never an echo either.
        ([ended(0, 1, 1.0), ended(1, 65, 1.2)], 65, 1),
        ([ended(0, 66, 1.0), ended(1, 65, 1.2)], 66, 0),
        ([ended(0, 1, 1.0), ended(1, 84, 1.2)], 84, 1),
        # A rank that says it fails, and then takes its time, failed first.
        ([ended(0, 5, 3.0, reported=1.0), ended(1, 1, 2.0)], 5, 0),
        ([ended(0, 1, 1.0), ended(1, 1, 1.0)], 1, 0),
    ],
)
def test_verdict(exits: list[RankExit], code: int, culprit: int | None) -> None:
    for order in (exits, exits[::-1]):
        verdict = decide(order)
        assert (verdict.code, verdict.culprit.rank if verdict.culprit else None) == (code, culprit)


def test_the_other_ranks_that_failed_are_named_in_the_order_of_their_ends() -> None:
    exits = [
        ended(0, 1, 1.0),
        ended(1, -9, 9.0, killed=True),
        ended(2, 65, 3.0),
        ended(3, 7, 0.5),
        ended(4, 0, 0.1),
        ended(5, 75, 0.2),
    ]
    verdict = decide(exits)
    assert verdict.culprit is not None
    assert (verdict.culprit.rank, [rank.rank for rank in verdict.also_failed]) == (2, [3, 0])


def test_ranks_that_did_not_stop_within_the_grace_were_terminated() -> None:
    exits = [ended(0, 75, 1.0), ended(1, -9, 2.0, killed=True)]
    assert decide(exits, grace_ran_out=True).code == 143
    assert decide(exits, grace_ran_out=False).code == 137


@pytest.mark.parametrize(
    ("exits", "code"),
    [
        ([ended(0, 75, 9.0), ended(1, -15, 1.0)], 75),
        ([ended(0, 75, 9.0), ended(1, 143, 1.0)], 75),
        # Nobody saved.
        ([ended(0, -15, 1.0), ended(1, -15, 1.0)], 143),
        ([ended(0, 0, 9.0), ended(1, -15, 1.0)], 143),
        # A failure stays one.
        ([ended(0, 75, 9.0), ended(1, 1, 1.0)], 1),
        ([ended(0, 75, 9.0), ended(1, -15, 1.0), ended(2, 1, 2.0)], 143),
        ([ended(0, 75, 9.0), ended(1, -15, 1.0), ended(2, -9, 2.0)], 137),
    ],
)
def test_after_a_stop_one_rank_saves_for_those_that_sigterm_ended(exits: list[RankExit], code: int) -> None:
    assert decide(exits, stop_requested=True).code == code
    assert decide(exits).code != 75, "without a stop SIGTERM is somebody's kill"


def test_a_rank_that_outlived_the_grace_was_terminated_whoever_saved() -> None:
    exits = [ended(0, 75, 1.0), ended(1, -15, 0.5), ended(2, -9, 9.0, killed=True)]
    assert decide(exits, stop_requested=True, grace_ran_out=True).code == 143


@pytest.mark.parametrize(
    ("exits", "spoilt"),
    [
        ([], False),
        ([ended(0, 0, 1.0), ended(1, 75, 1.0)], False),
        ([ended(1, -15, 1.0)], False),
        ([ended(1, 143, 1.0)], False),
        ([ended(1, -15, 1.0), ended(2, 1, 1.5)], False),
        ([ended(1, -15, 1.0), ended(2, -6, 1.5)], False),
        ([ended(1, 1, 1.0)], True),
        ([ended(1, -15, 1.0), ended(2, 1, 0.5)], True),
        ([ended(1, -15, 1.0), ended(2, 1, 1.5, reported=0.5)], True),
        ([ended(1, -15, 1.0), ended(2, -9, 1.5)], True),
        ([ended(1, -15, 1.0), ended(2, 66, 1.5)], True),
    ],
)
def test_what_ends_the_grace_of_the_others_after_a_stop(exits: list[RankExit], spoilt: bool) -> None:
    for order in (exits, exits[::-1]):
        assert spoils(order) is spoilt
