"""JSON texts are split where a parser would split them, whatever their strings contain and however they
arrive.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from zerotrain.contract import json_depth, json_text
from zerotrain.contract.json_depth import Nesting
from zerotrain.contract.json_text import ItemSplitter, members

pytestmark = pytest.mark.unit

ROOT = ("apiVersion", "kind", "metadata", "spec", "status")
SEPARATORS = [(",", ":"), (", ", ": ")]
LEAVES: list[Any] = [
    *(1, None, True, -1.5e3, "", 'a"b', "\\", '\\\\"', "\n\\n", "é", "half \ud800"),
    *(',"spec":{', '}],"kind":', '{"metadata":', "[[[{{{", "]}]}", '"items":['),
]


def value(chance: random.Random, depth: int = 0) -> Any:
    """Return a random value, with keys that the readers look for."""
    kind = chance.random()
    if depth > 4 or kind < 0.3:
        return chance.choice(LEAVES)
    if kind < 0.6:
        return [value(chance, depth + 1) for _ in range(chance.randrange(4))]
    keys = ["spec", "status", "metadata", "items", "kind", "x\\", '"', ""]
    return {chance.choice(keys): value(chance, depth + 1) for _ in range(chance.randrange(4))}


@pytest.fixture(params=[3, 64, json_depth._PIECE])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Size of the pieces in which a text arrives; escapes and strings cross their boundaries.

    Deep parts are skipped after every second name instead of every 64th.
    """
    monkeypatch.setattr(json_depth, "_PIECE", request.param)
    monkeypatch.setattr(json_depth, "_STRIDE", request.param)
    monkeypatch.setattr(json_text, "_MISSES", 2)
    return int(request.param)


@pytest.mark.parametrize("separators", SEPARATORS)
def test_members_are_those_that_a_parser_finds(piece: int, separators: tuple[str, str]) -> None:
    chance = random.Random(piece)
    for _ in range(150):
        names = chance.sample(ROOT, chance.randrange(len(ROOT) + 1))
        whole = {name: value(chance) for name in names}
        text = json.dumps(whole, separators=separators).encode()
        assert {name: json.loads(part) for name, part in members(text, ROOT).items()} == whole


def split(text: bytes, sizes: random.Random, most: int) -> tuple[list[bytes], bytes]:
    splitter, found, at = ItemSplitter(), list[bytes](), 0
    while at < len(text):
        size = sizes.randrange(1, most)
        found += splitter.feed(text[at : at + size])
        at += size
    return found + splitter.finish(), splitter.envelope


@pytest.mark.parametrize("separators", SEPARATORS)
def test_a_list_comes_apart_into_its_items_in_whatever_pieces_it_comes(
    piece: int, separators: tuple[str, str]
) -> None:
    """Lists of the API server's own kinds end with their items, those of custom resources do not."""
    chance = random.Random(piece)
    for _ in range(60):
        items = [
            {"metadata": {"name": value(chance)}, "spec": value(chance), "status": value(chance)}
            for _ in range(chance.randrange(5))
        ]
        kinds = [{"apiVersion": "v", "kind": "k", **item} for item in items]
        meta = {"resourceVersion": "5", "continue": value(chance)}
        for whole in (
            {"kind": "L", "apiVersion": "v", "metadata": meta, "items": items},
            {"apiVersion": "v", "items": kinds, "kind": "L", "metadata": meta},
        ):
            text = json.dumps(whole, separators=separators).encode() + chance.choice([b"", b"\n"])
            found, envelope = split(text, chance, chance.choice([2, 40, 10_000]))
            assert [json.loads(item) for item in found] == whole["items"]
            assert json.loads(envelope) == {**whole, "items": []}


@pytest.mark.parametrize("whole", [{}, {"kind": "Status"}, {"metadata": {}, "items": None}])
def test_what_has_no_items_is_all_envelope(whole: Any) -> None:
    found, envelope = split(json.dumps(whole).encode(), random.Random(1), 5)
    assert not found
    assert json.loads(envelope) == whole


def test_a_list_that_breaks_off_is_an_error() -> None:
    splitter = ItemSplitter()
    splitter.feed(b'{"items":[{"metadata":{}},{"metadata":')
    with pytest.raises(ValueError, match="ends within"):
        splitter.finish()


def test_no_depth_is_too_deep_for_it() -> None:
    deep = b'{"metadata":{"name":"a"},"spec":' + b'{"spec":' * 9000 + b"1" + b"}" * 9001
    assert members(deep, ROOT)["metadata"] == b'{"name":"a"}'


@pytest.mark.parametrize("name", ["spec", "kind", "metadata"])
def test_names_in_a_free_form_part_are_not_judged_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred thousand of them would take a second."""
    feed, pieces = Nesting.feed, list[int]()

    def counted(nesting: Nesting, text: bytes) -> None:
        pieces.append(len(text))
        feed(nesting, text)

    monkeypatch.setattr(Nesting, "feed", counted)
    many = b",".join([json.dumps({name: 1}).encode()] * 100_000)
    text = b'{"kind":"K","spec":{"config":[' + many + b']},"status":{}}'
    found = members(text, ROOT)
    splitter = ItemSplitter()
    splitter.feed(b'{"metadata":{},"items":[')
    items = [*splitter.feed(text), *splitter.feed(b"]}"), *splitter.finish()]
    assert len(pieces) < 1000
    assert (list(found), found["kind"], found["status"]) == (["kind", "spec", "status"], b'"K"', b"{}")
    assert items == [text]


def test_one_item_is_held_and_not_the_list() -> None:
    item = json.dumps({"metadata": {}, "spec": [{}] * 10_000}).encode()
    splitter, most = ItemSplitter(), 0
    splitter.feed(b'{"metadata":{},"items":[')
    for number in range(40):
        splitter.feed(b"," * (number > 0) + item)
        most = max(most, len(splitter._text) - splitter._from)
    assert most <= len(item) + 100
