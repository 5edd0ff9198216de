"""Identifiers and modules are named with the field's terms: none carries a word of a private vocabulary."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.sources import PARTS, python_files

pytestmark = pytest.mark.unit

PRIVATE = frozenset(
    re.findall(
        r"\w+",
        """burying doubt doubts fate gremlin handout hands heed incarnation laggard lane mute owe owes room
        shelf telling told turn unheard vault wish""",
    )
)
"""Words with a common term in its place; the term depends on the object, such as `message` or `reported` for
`told`, `capacity` for `room`, `slot` or `round` for `turn`, `queue` for `lane`, `state` for `fate`."""

_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
_NAME = re.compile(r"[A-Za-z_]\w*")


@cache
def is_private(name: str) -> bool:
    """Return whether a name in snake_case or CamelCase has a private word."""
    return not PRIVATE.isdisjoint(map(str.lower, _WORD.findall(name)))


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of every definition: functions, classes, parameters, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield node.lineno, name


def offenders(path: str, text: str) -> list[str]:
    """Return `path:line: name` of every name that carries a private word, that of the module first."""
    module = Path(path).stem
    found = [f"{path}: module {module}"] if is_private(module) else []
    # Few files mention such a word at all, and parsing all of them takes seconds.
    if any(is_private(name) for name in set(_NAME.findall(text))):
        found += [f"{path}:{line}: {name}" for line, name in names(ast.parse(text)) if is_private(name)]
    return found


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def open_vault(): ...", "open_vault"),
        ("async def heed_signal(): ...", "heed_signal"),
        ("class SpillVault: ...", "SpillVault"),
        ("class HTTPLane: ...", "HTTPLane"),
        ("def f(room): ...", "room"),
        ("def f(*, free_room=1): ...", "free_room"),
        ("MOST_TOLD = 1", "MOST_TOLD"),
        ("self._turn = 1", "_turn"),
        ("fate: int", "fate"),
        ("for turn in range(3): ...", "turn"),
        ("import os as shelf", "shelf"),
        ("try: ...\nexcept OSError as doubt: ...", "doubt"),
        ("if (wish := 1): ...", "wish"),
    ],
)
def test_a_planted_word_is_found(source: str, name: str) -> None:
    line = source.count("\n") + 1
    assert offenders("tests/planted.py", source) == [f"tests/planted.py:{line}: {name}"]


@pytest.mark.parametrize(
    "source",
    ["def returned(): ...", "'told'", "x = 'room'  # in turn", "planes = rooms", "class Permuted: ..."],
)
def test_longer_words_and_texts_are_no_offence(source: str) -> None:
    assert offenders("tests/planted.py", source) == []


def test_a_planted_module_is_found() -> None:
    assert offenders("tests/test_handout.py", "") == ["tests/test_handout.py: module test_handout"]


@pytest.mark.parametrize("part", PARTS)
def test_no_name_carries_a_private_word(part: str) -> None:
    found = [each for path, text in python_files(part) for each in offenders(path, text)]
    assert not found, f"{len(found)} names carry one of {sorted(PRIVATE)}:\n" + "\n".join(found)
