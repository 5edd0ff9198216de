"""Patterns of failure rules: they match what `re` matches, are refused with the reason, and take bounded
time.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotrain.operator.api.failures import PatternError, compiled

pytestmark = pytest.mark.unit


FOUND = [
    ("CUDA error", "RuntimeError: CUDA error: an illegal memory access"),
    (r"^RuntimeError", "RuntimeError: x"),
    (r"Error$", "an Error"),
    (r"ECC|NVLink|Xid \d+", "NVRM: Xid 79, GPU has fallen off the bus"),
    (r"Xid (48|79|9[45])\b", "Xid 94, x"),
    (r"(?i)out of memory", "CUDA Out Of Memory"),
    (r"(?i)[A-C]UDA", "cuda"),
    (r"rank [0-9]{2,3} ", "rank 117 died"),
    (r"a{2}b?c*d+", "xaaddy"),
    (r"(ab|cd)+?e", "abcde"),
    (r"\.\*\(\[", "a.*([b"),
    (r"[^\s,]+,", "one, two"),
    (r"[]x-]$", "a]"),
    (r"a{,2}", "a{,2}"),
    ("", "anything"),
    (r"x*", ""),
    (r"\bOOM\b", "the OOM killer"),
    (r"a.c", "a\u00e9c"),
]
NOT_FOUND = [
    (r"^x", "ax"),
    (r"x$", "xa"),
    (r"a.c", "a\nc"),
    (r"\bOOM\b", "ZOOMED"),
    (r"rank [0-9]{2,3} ", "rank 1 died"),
    (r"out of memory", "Out Of Memory"),
    (r"[^a]", "aaa"),
]
REFUSED = [
    (r"(a", "missing )"),
    (r"a)", "unexpected )"),
    (r"*a", "no argument for repetition"),
    (r"a{3,1}", "invalid repetition size"),
    (r"(?=a)", "invalid perl operator"),
    (r"(a)\1", "invalid escape sequence"),
    (r"[z-a]", "invalid character class range"),
    (r"[a", "missing ]"),
    ("a\\", "trailing"),
    (r"((((a{99}){99}){99}){99}){99}", "invalid repetition size"),
    (r"((\pL{30}){30})", "too large"),
    ("a" * 257, "at most 256"),
]


@pytest.mark.parametrize(("pattern", "text"), FOUND)
def test_found(pattern: str, text: str) -> None:
    assert compiled(pattern).found_in(text)
    assert re.search(pattern, text)


@pytest.mark.parametrize(("pattern", "text"), NOT_FOUND)
def test_not_found(pattern: str, text: str) -> None:
    assert not compiled(pattern).found_in(text)
    assert not re.search(pattern, text)


@pytest.mark.parametrize(("pattern", "why"), REFUSED, ids=[pattern[:20] for pattern, _ in REFUSED])
def test_refused(pattern: str, why: str) -> None:
    with pytest.raises(PatternError, match=re.escape(why)):
        compiled(pattern)


PIECES = (
    "a",
    "b",
    "ab",
    ".",
    "[ab]",
    "[^a]",
    "(a|b)",
    "(ab|a)",
    "(a*b)",
    "(?:b|)",
    "\\d",
    "\\w",
    "^",
    "$",
    "\\b",
)
REPEATS = ("", "", "", "*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}")


@st.composite
def patterns(draw: st.DrawFn) -> str:
    """Draw patterns that backtracking handles, so that `re` can be the reference on short texts."""
    parts = draw(st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from(REPEATS)), max_size=6))
    return "".join(piece if piece in ("^", "$", "\\b") else piece + times for piece, times in parts)


@settings(max_examples=60, deadline=None)
@given(patterns(), st.text(alphabet="ab1 \n", max_size=12))
def test_agrees_with_re(pattern: str, text: str) -> None:
    # In `re` a $ also stands before a final newline, in RE2 only at the end.
    expression = pattern.replace("$", r"\Z")
    assert compiled(pattern).found_in(text) == bool(re.search(expression, text))


@pytest.mark.parametrize(
    "pattern",
    [r"(a*)*b", r"(a|a)*b", r"(a|aa)+$", r".*.*.*.*=.*x", r"(x+x+)+y", r"(.?){60}b", r"((a{9}){9})b"],
)
def test_what_makes_others_explode_costs_a_bounded_number_of_steps(pattern: str) -> None:
    """Each of these keeps `re` busy for longer than a test may take."""
    assert not compiled(pattern).found_in("a" * 1000 + "!")
