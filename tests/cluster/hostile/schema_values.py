"""The longest, deepest and dirtiest values for a place of the schema, the worst first.

The first value of every variant that the API server accepts is used, as rejected values are harmless. Values
are JSON text, so that depth costs nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.cluster.hostile.bodies import keyed, listed, nested_lists, nested_objects
from tests.cluster.hostile.schema_walk import (
    Place,
    Schema,
    is_free,
    is_map,
    is_quantity,
    least,
    matches,
)
from tests.cluster.hostile.texts import BREAKLESS, DIRT, filled

BUDGETS = (1_300_000, 600_000, 250_000, 60_000, 10_000, 1_000)
"""Sizes of one value in bytes.

The owners of fields are stored beside free-form objects and take as much again.
"""

DEPTHS = (9_900, 3_000, 1_500, 600, 300, 100, 30, 10)
MOST_ENTRIES = 20_000


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kind of hostile value at a place."""

    place: Place
    name: str
    values: Callable[[], Iterator[str]]
    """Function that yields values as JSON text, the worst first."""

    def __str__(self) -> str:
        return f"{self.place} {self.name}"


def variants(place: Place) -> list[Variant]:
    """Return the variants of a place, at least one."""
    schema = place.schema
    if is_free(schema):
        ways = {"deepest": _deep, "deepest lists": _deep_lists, "longest": _long, "dirtiest": _dirty_keys}
        return [Variant(place=place, name=name, values=values) for name, values in ways.items()]
    if is_map(schema):
        return [Variant(place=place, name="fullest", values=lambda: _maps(schema))]
    if schema.get("type") == "array":
        return [Variant(place=place, name="longest", values=lambda: _lists(schema))]
    return [Variant(place=place, name="dirtiest", values=lambda: map(json.dumps, texts(schema)))]


def _deep() -> Iterator[str]:
    return map(nested_objects, DEPTHS)


def _deep_lists() -> Iterator[str]:
    return (f'{{"x":{nested_lists(depth)}}}' for depth in DEPTHS)


def _long() -> Iterator[str]:
    return (f'{{"x":{listed("{}", size)}}}' for size in BUDGETS)


def _dirty_keys() -> Iterator[str]:
    key = json.dumps(DIRT)[1:-1]
    return (keyed("{}", size, key=key + "{}") for size in BUDGETS)


def texts(schema: Schema, limit: int = BUDGETS[0]) -> Iterator[str]:
    """Yield strings that the schema accepts by its pattern and lengths, the worst first."""
    if "enum" in schema:
        yield from reversed(schema["enum"])
        return
    length = min(schema.get("maxLength", limit), limit)
    for text in _candidates(length):
        if len(text) >= schema.get("minLength", 0) and matches(schema.get("pattern", ""), text):
            yield text
    if is_quantity(schema):
        yield "9" * 18 + "Ei"
        yield "1"


def _candidates(length: int) -> Iterator[str]:
    """Yield dirty strings of the largest length, then clean ones."""
    heads = ("", "/", "a/", "a:", "m:f", "builtin:")
    for dirt in (DIRT, DIRT.replace(":", "").replace("\x00", ""), BREAKLESS):
        for head in heads:
            yield head + filled(dirt, length - len(head) - 1) + "a" if length > len(head) else head[:length]
    yield "9" * (length - 2) + "Ei"
    for head in (*heads, "a" * 253 + "/"):
        if length > len(head):
            yield head + "a" * (length - len(head))
    # Names have parts of at most 63 characters for checks that go beyond the schema.
    yield filled("a" * 62 + ".", min(length, 188))
    yield "a/" + "a" * min(length - 2, 63)
    yield "a" * min(length, 63)
    yield "9" * min(length, 18)
    # Networks.
    yield "f" * (length - 4) + "/999"
    yield "::/0"
    yield "a"


def _lists(schema: Schema) -> Iterator[str]:
    items = schema["items"]
    is_set = schema.get("x-kubernetes-list-type") == "set"
    for budget in BUDGETS:
        count = schema.get("maxItems", min(MOST_ENTRIES, budget // 20))
        if "enum" in items:
            yield json.dumps(items["enum"][:count])
            continue
        if items.get("type") != "string":
            yield json.dumps([least(items, at) for at in range(min(count, budget // 10))])
            continue
        size = max(budget // count // 3, 1)
        for text in texts(items, size):
            marks = (_numbered(text, at) for at in range(count)) if is_set else (text for _ in range(count))
            yield json.dumps(list(marks))


def _numbered(text: str, number: int) -> str:
    """Return a text of the same length and kind that contains the number."""
    mark = f"a{number}"
    return text[: -len(mark)] + mark if len(text) > len(mark) else mark


def _maps(schema: Schema) -> Iterator[str]:
    """Yield maps, with dirty keys first; only the size of the object limits a key."""
    part = schema["additionalProperties"]
    for key in (DIRT, BREAKLESS, "a" * 200 + "/" + "k", "example.com/k", "k"):
        for budget in BUDGETS:
            count = schema.get("maxProperties", min(MOST_ENTRIES, budget // 100))
            size = max(budget // count - len(key) * 3, 1)
            value = next(texts(part, size)) if part.get("type") == "string" else least(part)
            yield json.dumps({f"{key}{at}": value for at in range(count)})
    yield json.dumps({"storage": least(part)})
