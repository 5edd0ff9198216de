"""Docstrings begin with a verb in the imperative or with a noun phrase, never in the middle of a sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.sources import PARTS, python_files

pytestmark = pytest.mark.unit

FRAGMENTS = frozenset(
    re.findall(
        r"\w+",
        """about above across after again against along also although among and anyway as at because before
        behind below beneath beside besides between beyond but by during else even everything except far
        few for from goes has have he here how however if in into is it its itself less like may more
        most much must nearly neither never next nobody none nor not nothing of off on once only onto or
        other others otherwise out outside over per rather same see shall she since so somebody
        something such than that them then there these they this those though through till to together
        too toward towards under unless until up upon via what whatever when where which while who
        whoever whose why with within without""",
    )
)
"""Words that continue a clause. `whether` is not among them: it begins the description of a boolean."""

_CANDIDATE = re.compile(
    rf"""^[ \t]*[rR]?\"{{3}}\s*(?:{"|".join(FRAGMENTS)})\b""", re.IGNORECASE | re.MULTILINE
)
"""Line that may begin such a docstring. Files without one are not parsed: that would take seconds."""

_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, including those below an assignment."""
    for node in ast.walk(tree):
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(body, list):
                continue
            for before, item in zip([None, *body], body, strict=False):
                is_first = before is None and isinstance(node, _WITH_DOCSTRING)
                if not is_first and not isinstance(before, (ast.Assign, ast.AnnAssign)):
                    continue
                match item:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield item.lineno, text


def fragments(text: str) -> list[str]:
    """Return line number and first line of every docstring that begins with a word of FRAGMENTS."""
    if not _CANDIDATE.search(text):
        return []
    found = []
    for line, docstring in docstrings(ast.parse(text)):
        first = docstring.strip().split("\n")[0]
        word = first.split(" ")[0].strip(".,:;").lower()
        if word in FRAGMENTS:
            found.append(f"{line}: {first}")
    return found


SHARES = 4
"""Number of tests that share the files of a part, as a unit test takes at most a second."""


@pytest.mark.parametrize("docstring", ["Of all jobs.", "By name.", "So long a list is good."])
@pytest.mark.parametrize(
    "source",
    [
        'x = 1\n"""{}"""\n',
        'x: int = 1\n"""{}"""\n',
        'def f():\n    """{}"""\n',
        'class C:\n    r"""\n    {}"""\n',
    ],
)
def test_a_fragment_is_found(source: str, docstring: str) -> None:
    assert fragments(source.format(docstring))
    assert not fragments(source.format("Return the number of jobs."))


def test_other_texts_are_not_docstrings() -> None:
    assert not fragments('f(\n    """of a text"""\n)\n')


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("part", PARTS)
def test_every_docstring_begins_with_a_verb_or_a_noun(part: str, share: int) -> None:
    files = list(python_files(part))[share::SHARES]
    assert files
    found = [f"{path}:{each}" for path, text in files for each in fragments(text)]
    assert not found, "\n".join(found)
