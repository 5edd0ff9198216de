"""docs/glossary.md: one line per term, each term once, every section in order."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.test_repo_shape import ROOT

pytestmark = pytest.mark.unit


PAGE = ROOT / "docs" / "glossary.md"


def sections(text: str) -> dict[str, list[str]]:
    """Heading -> terms of its table."""
    parts = text.split("\n## ")[1:]
    return {
        part.splitlines()[0]: re.findall(r"^\| (?!Term )(.+?) \| .+ \|$", part, flags=re.MULTILINE)
        for part in parts
    }


def unordered(text: str) -> list[str]:
    """Terms that stand behind one that comes later in the alphabet."""
    found = []
    for terms in sections(text).values():
        keys = [term.lower() for term in terms]
        found += [term for term, key, before in zip(terms[1:], keys[1:], keys, strict=False) if key < before]
    return found


def test_every_section_is_alphabetical() -> None:
    text = PAGE.read_text()
    assert min(map(len, sections(text).values())) > 3
    assert unordered(text) == []


def test_no_term_is_defined_twice() -> None:
    terms = Counter(term for terms in sections(PAGE.read_text()).values() for term in terms)
    assert [term for term, times in terms.items() if times > 1] == []


def test_the_check_sees_a_term_out_of_order() -> None:
    assert unordered("\n## A\n| Term | Meaning |\n|---|---|\n| b | x |\n| a | x |\n") == ["a"]
