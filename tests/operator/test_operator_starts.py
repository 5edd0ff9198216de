"""Who creates pods and who stands in line: nobody is forgotten, and a large job keeps nobody waiting."""

from __future__ import annotations

from zerotrain.operator.handlers.starts import LARGE, Starts


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


def test_a_large_job_and_one_that_creates_nothing_need_no_place() -> None:
    starts = Starts[str](limit=1)
    assert enters(starts, "a") == [True]
    assert starts.enter("large", pods=LARGE + 1)
    assert starts.enter("done", pods=0)
    assert not starts.enter("b", pods=LARGE)
    assert starts.leave("large") == []
    assert starts.leave("a") == ["b"]


def test_a_new_job_stands_in_line_without_a_pass_and_keeps_its_turn() -> None:
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
