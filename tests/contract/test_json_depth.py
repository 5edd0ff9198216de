"""The depth of a JSON text is the one that a parser meets, whatever its strings contain."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotrain.contract import json_depth
from zerotrain.contract.json_depth import depth_of

pytestmark = pytest.mark.unit

SCALARS: list[Any] = [
    1,
    None,
    True,
    -1.5e3,
    "",
    'a"b',
    "\\",
    '\\\\"',
    "\n\\n",
    "é",
    "half \ud800",
    "[[[{{{",
    "]}]}",
]


def value(chance: random.Random, left: int) -> Any:
    kind = chance.random()
    if left == 0 or kind < 0.2:
        return chance.choice(SCALARS)
    if kind < 0.6:
        return [value(chance, left - 1) for _ in range(chance.randrange(4))]
    return {
        chance.choice(["a", "x\\", '"', "[", ""]): value(chance, left - 1) for _ in range(chance.randrange(4))
    }


def depth(part: Any) -> int:
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


def reached(text: str) -> int:
    """Return the depth at which a parser meets a character that it cannot read at all.

    Other mistakes do not stop it: any order of readable characters is accepted.
    """
    open_now = deepest = 0
    in_string = is_escaped = False
    for character in text:
        if in_string:
            in_string = is_escaped or character != '"'
            is_escaped = not is_escaped and character == "\\"
        elif character == '"':
            in_string = True
        elif character in "[{":
            open_now += 1
            deepest = max(deepest, open_now)
        elif character in "]}":
            open_now -= 1
        if open_now < 0 or (character == "\\" and not in_string):
            break
    return deepest


@pytest.mark.parametrize("piece", [3, 64, json_depth._PIECE])
def test_it_is_exact(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Escapes and strings cross the boundaries of pieces."""
    monkeypatch.setattr(json_depth, "_PIECE", piece)
    chance = random.Random(piece)
    for _ in range(60):
        whole = value(chance, 5)
        for text in (json.dumps(whole), json.dumps(whole, ensure_ascii=False)):
            encoded = text.encode("utf-8", "surrogatepass")
            assert depth_of(text) == depth_of(encoded) == depth_of(bytearray(encoded)) == depth(whole)
            limit = chance.randrange(6)
            assert min(depth_of(text, limit=limit), limit + 1) == min(depth(whole), limit + 1)


@pytest.mark.parametrize("piece", [3, json_depth._PIECE])
def test_no_text_takes_a_parser_deeper_than_its_limit(piece: int) -> None:
    @settings(max_examples=60)
    @given(st.text(alphabet='[]{}"\\,:a1 \n'))
    def check(text: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_depth, "_PIECE", piece)
            assert depth_of(text) >= reached(text)

    check()


@pytest.mark.parametrize(
    ("text", "deep"),
    [
        ("[" * 60_000, 60_000),
        ('{"a":' * 60_000 + "1" + "}" * 60_000, 60_000),
        ('{"a":[' * 3000 + "1" + "]}" * 3000, 6000),
        ('["\\\\",' + "[" * 60_000, 60_001),
        ('["' + "[" * 60_000 + '"]', 1),
        ('["\\"' + "[" * 60_000 + '"]', 1),
        ("[" + "[]," * 60_000 + "[]]", 2),
        ('"' + "\\\\" * 60_000 + '"', 0),
    ],
    ids=["open", "objects", "both", "after a backslash", "string", "quote", "siblings", "backslashes"],
)
def test_no_depth_is_too_deep_for_it(text: str, deep: int) -> None:
    assert depth_of(text) == deep


def test_a_text_is_left_where_it_goes_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_depth, "_PIECE", 64)
    assert 8 < depth_of("[" * 10_000, limit=8) <= 64
