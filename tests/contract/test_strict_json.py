"""Strict reader of untrusted JSON: bounded, one kind of error, otherwise the values of the standard
library.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotrain.contract.strict_json import MAX_BYTES, MAX_DEPTH, JsonError, strict_json

pytestmark = pytest.mark.unit

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
TRICKY = st.text(alphabet='[]{}"\\,:a1 \n')


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


@given(VALUES)
def test_what_json_writes_is_read_as_json_reads_it(value: Any) -> None:
    text = json.dumps(value)
    assert strict_json(text) == strict_json(text.encode()) == json.loads(text)


@settings(max_examples=150)
@given(TRICKY)
def test_any_text_is_read_or_refused_with_one_error(text: str) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(JsonError):
            strict_json(text)
    else:
        assert strict_json(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "[" * 60_000,
        '{"a":' * 60_000,
        "[" * 60_000 + "]" * 60_000,
        '{"a":[' * 3000 + "1" + "]}" * 3000,
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        '["\\\\",' + "[" * 60_000,
    ],
)
def test_deep_nesting_is_refused_before_it_is_parsed(text: str) -> None:
    with pytest.raises(JsonError, match="nested more than 64 deep"):
        strict_json(text)


def test_the_deepest_text_allowed_is_read() -> None:
    assert depth_of(strict_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)) == MAX_DEPTH
    assert strict_json('["' + "[" * 60_000 + '"]') == ["[" * 60_000]  # no nesting: it is a string
    assert strict_json('["\\"' + "[" * 60_000 + '"]') == ['"' + "[" * 60_000]


def test_a_low_recursion_limit_gives_the_same_error() -> None:
    frame, used = sys._getframe(), 0
    while frame.f_back is not None:
        frame, used = frame.f_back, used + 1
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(used + 40)
    try:
        value = strict_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    except JsonError:
        value = None
    finally:
        sys.setrecursionlimit(before)
    # From Python 3.12 on the recursion limit does not count frames in C: there the text is read.
    assert (value is None) == (sys.version_info < (3, 12))


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}', "1e999", "[-1e400]"])
def test_numbers_that_json_has_no_form_for(text: str) -> None:
    with pytest.raises(JsonError):
        strict_json(text)
    assert strict_json(text, finite=False) is not None


def test_sizes_are_bounded() -> None:
    with pytest.raises(JsonError, match=rf"has {MAX_BYTES + 1} bytes; at most {MAX_BYTES}"):
        strict_json(b" " * (MAX_BYTES + 1))
    with pytest.raises(JsonError, match="at most 3"):
        strict_json("[1,2]", max_bytes=3)


@pytest.mark.parametrize("data", [b"\xff\xfe[\x001\x00]\x00", b'"\xed\xa0\x80"', b"\x80", b"", b" ", b"1 2"])
def test_bytes_are_utf8(data: bytes) -> None:
    with pytest.raises(JsonError):
        strict_json(data)


def test_a_byte_order_mark_is_passed_over() -> None:
    assert strict_json(b"\xef\xbb\xbf[1]") == [1]


def test_numbers_of_too_many_digits() -> None:
    with pytest.raises(JsonError, match="cannot be read"):
        strict_json("1" * 5000)


def test_repeated_keys() -> None:
    assert strict_json('{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(JsonError, match="names 'a' twice"):
        strict_json('{"b": {"a": 1, "a": 2}}', unique_keys=True)


def test_an_error_says_where() -> None:
    with pytest.raises(JsonError, match="line 2, column 3") as caught:
        strict_json('{"a":\n  x}')
    assert caught.value.offset == 8
