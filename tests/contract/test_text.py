"""Texts of untrusted programs: which characters stay, and that nothing else does."""

from __future__ import annotations

import unicodedata
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.dirt import dirty, raw_in
from zerotrain.contract.text import cut, is_printable, one_line, printable, printable_lines, word

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        pytest.param("loss is NaN", "loss is NaN", id="nothing-to-do"),
        pytest.param("a\nb\r\nc\u2028d\x85e\x0bf", "a b c d e f", id="line-breaks"),
        pytest.param("  a\tb \n\n  c  ", "a b c", id="gaps"),
        pytest.param("\x1b[1;31mred\x1b[0m \x9b32mgreen", "red green", id="colours"),
        pytest.param(
            "\x1b]0;title\x07a \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "a link", id="titles-links"
        ),
        pytest.param("bell\x07 back\x08 del\x7f c1\x90", "bell? back? del? c1?", id="controls"),
        pytest.param("\x1b[31; \x1b]0;no end", "?[31; ?]0;no end", id="no-end"),
        pytest.param("\x9d0;a\x9d0;title\x9c b", "?0;a b", id="begun-twice"),
        pytest.param("a\u202eb\u2066c\u200fd\u061ce", "abcde", id="directions"),
        pytest.param("z\u200dw\u200bj\ufeffb\u00ads", "zwjbs", id="invisible"),
        pytest.param("half \ud800, own \ue000, none \U000e0fff", "half ?, own ?, none ?", id="no-characters"),
        pytest.param(
            "Verlustübersicht 損失 потеря خسارة \u00a01",
            "Verlustübersicht 損失 потеря خسارة \u00a01",
            id="words",
        ),
    ],
)
def test_on_one_line(text: str, clean: str) -> None:
    assert one_line(text) == clean


@given(dirty(), st.integers(0, 300))
def test_nothing_raw_is_left_and_no_text_is_longer_than_its_limit(text: str, limit: int) -> None:
    found = one_line(text, limit)
    assert not raw_in(found)
    assert len(found) <= limit
    assert one_line(found, limit) == found
    for line in printable_lines(text):
        assert not raw_in(line.replace("\t", " "))
    assert len(word(text)) <= 253


@given(dirty())
def test_what_would_be_replaced_is_what_the_categories_say(text: str) -> None:
    """The reference looks at one character after the other, by its category alone."""
    kept = all(
        unicodedata.category(item)[0] in "LMNPS" or unicodedata.category(item) == "Zs" for item in text
    )
    assert is_printable(text) == kept
    if kept:
        assert printable(text) == text


def test_a_line_of_a_log_is_what_a_terminal_would_show_last() -> None:
    assert printable("10 %\r50 %\r100 %\r\n") == "100 %"
    assert printable_lines("a\tb\x1b[K\nc\x07") == ["a\tb", "c?"]


def test_a_long_text_keeps_both_ends() -> None:
    found = one_line("first " + "x" * 1_000_000 + " last", 100)
    assert 99 <= len(found) <= 100
    assert found.startswith("first ")
    assert found.endswith(" last")
    assert [cut("abcdefgh", limit) for limit in (8, 7, 3, 1, 0)] == ["abcdefgh", "a ... h", "...", ".", ""]


def seconds_for(text: str) -> float:
    """Return the processor time of cleaning a text."""
    began = process_time()
    printable(text)
    return process_time() - began


@pytest.mark.parametrize("piece", ["\x9d", "\x9b", "\x1b]", "\x9d" + "a" * 999, "\x9b" + "0" * 40 + " " * 4])
def test_sequences_without_an_end_cost_no_more_than_other_characters(piece: str) -> None:
    """Searches to their limit from each of them would take five hundred times as long."""
    length = 20_000
    others = min(seconds_for("\x01" * length) for _ in range(3))
    assert min(seconds_for(piece * (length // len(piece))) for _ in range(3)) < 30 * others
