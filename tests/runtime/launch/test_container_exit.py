"""The rank to blame, as a table: (how the ranks ended) -> (code, culprit)."""

from __future__ import annotations

import pytest

from zerotrain.runtime.launch.container_exit import RankExit, decide, spoils

pytestmark = pytest.mark.unit


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
        # The launcher's own SIGKILL blames no rank while another one failed.
        ([ended(0, -9, 6.0, killed=True), ended(1, 1, 1.0)], 1, 1),
        ([ended(0, -9, 6.0, killed=True), ended(1, -9, 1.0)], 137, 1),
        # The peer reports the lost connection before the parent of the killed rank gets its exit status.
        ([ended(0, 1, 1.5, reported=1.0), ended(1, -9, 1.2)], 137, 1),
        ([ended(0, 1, 1.0), ended(1, -11, 1.2)], 139, 1),
        # A watchdog's abort may be the echo of a failure, so the times decide.
        ([ended(0, 1, 1.0), ended(1, -6, 1.2)], 1, 0),
        ([ended(0, 1, 1.2), ended(1, -15, 1.0)], 143, 1),
        # An error that the user must correct is never an echo, either.
        ([ended(0, 1, 1.0), ended(1, 65, 1.2)], 65, 1),
        ([ended(0, 66, 1.0), ended(1, 65, 1.2)], 66, 0),
        ([ended(0, 1, 1.0), ended(1, 84, 1.2)], 84, 1),
        # A rank that announces its failure and then ends slowly failed first.
        ([ended(0, 5, 3.0, reported=1.0), ended(1, 1, 2.0)], 5, 0),
        ([ended(0, 1, 1.0), ended(1, 1, 1.0)], 1, 0),
    ],
)
def test_container_exit(exits: list[RankExit], code: int, culprit: int | None) -> None:
    for order in (exits, exits[::-1]):
        found, failed = decide(order)
        assert (found, failed[0].rank if failed else None) == (code, culprit)


def test_the_other_ranks_that_failed_are_named_in_the_order_of_their_ends() -> None:
    exits = [
        ended(0, 1, 1.0),
        ended(1, -9, 9.0, killed=True),
        ended(2, 65, 3.0),
        ended(3, 7, 0.5),
        ended(4, 0, 0.1),
        ended(5, 75, 0.2),
    ]
    _, failed = decide(exits)
    assert [rank.rank for rank in failed] == [2, 3, 0]


def test_ranks_that_did_not_stop_within_the_grace_were_terminated() -> None:
    exits = [ended(0, 75, 1.0), ended(1, -9, 2.0, killed=True)]
    assert decide(exits, grace_ran_out=True)[0] == 143
    assert decide(exits, grace_ran_out=False)[0] == 137


@pytest.mark.parametrize(
    ("exits", "code"),
    [
        ([ended(0, 75, 9.0), ended(1, -15, 1.0)], 75),
        ([ended(0, 75, 9.0), ended(1, 143, 1.0)], 75),
        # No rank saved.
        ([ended(0, -15, 1.0), ended(1, -15, 1.0)], 143),
        ([ended(0, 0, 9.0), ended(1, -15, 1.0)], 143),
        # A failure stays a failure.
        ([ended(0, 75, 9.0), ended(1, 1, 1.0)], 1),
        ([ended(0, 75, 9.0), ended(1, -15, 1.0), ended(2, 1, 2.0)], 143),
        ([ended(0, 75, 9.0), ended(1, -15, 1.0), ended(2, -9, 2.0)], 137),
    ],
)
def test_after_a_stop_one_rank_saves_for_those_that_sigterm_ended(exits: list[RankExit], code: int) -> None:
    assert decide(exits, stop_requested=True)[0] == code
    assert decide(exits)[0] != 75, "without a stop SIGTERM is somebody's kill"


def test_a_rank_that_outlived_the_grace_was_terminated_whoever_saved() -> None:
    exits = [ended(0, 75, 1.0), ended(1, -15, 0.5), ended(2, -9, 9.0, killed=True)]
    assert decide(exits, stop_requested=True, grace_ran_out=True)[0] == 143


SAVED, TERMINATED = ended(0, 75, 9.0), ended(1, -15, 1.0)


@pytest.mark.parametrize(
    ("exits", "code"),
    [
        # The peers lost their connection to the one that SIGTERM ended; the last saved.
        ([SAVED, TERMINATED, ended(2, 1, 2.0)], 75),
        ([SAVED, TERMINATED, ended(2, -6, 2.0)], 75),
        ([SAVED, TERMINATED, ended(2, 1, 2.0), ended(3, -15, 3.0)], 75),
        ([SAVED, TERMINATED], 75),
        ([SAVED, ended(1, 0, 1.0)], 75),
        # Nobody saved.
        ([ended(0, 0, 9.0), TERMINATED, ended(2, 1, 2.0)], 143),
        # By itself: before anybody went, or in a way that no lost peer leads to.
        ([SAVED, ended(2, 1, 2.0)], 1),
        ([SAVED, TERMINATED, ended(2, 1, 0.5)], 1),
        ([SAVED, TERMINATED, ended(2, 1, 2.0, reported=0.5)], 1),
        ([SAVED, TERMINATED, ended(2, -9, 2.0)], 137),
        ([SAVED, TERMINATED, ended(2, 66, 2.0)], 66),
    ],
)
def test_what_leaves_a_program_of_the_users_own_its_grace_is_no_failure(
    exits: list[RankExit], code: int
) -> None:
    for order in (exits, exits[::-1]):
        found, failed = decide(order, stop_requested=True, own_program=True)
        assert found == code
        assert (not failed) is (code == 75)
        assert decide(order, own_program=True)[0] == decide(order)[0], "nobody asked: as of the trainer"


@pytest.mark.parametrize(("grace_ran_out", "code"), [(True, 143), (False, 137)])
def test_a_rank_that_the_launcher_killed_did_not_stop_whoever_saved(grace_ran_out: bool, code: int) -> None:
    exits = [SAVED, TERMINATED, ended(2, 1, 2.0), ended(3, -9, 10.0, killed=True)]
    result = decide(exits, stop_requested=True, grace_ran_out=grace_ran_out, own_program=True)
    assert result == (code, (exits[3],))


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
