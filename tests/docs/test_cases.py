"""docs/operator/cases.md names only tests that exist, and rows that their tables have."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks


REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "operator" / "cases.md"
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`((?:,? \"[^\"]+\")*)")


def missing(page: str, repository: Path) -> list[str]:
    """Return the references of the page that point to nothing."""
    found = []
    for file, function, rows in REFERENCE.findall(page):
        path = repository / file
        text = path.read_text() if path.is_file() else ""
        strings, functions = set(), set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.add(node.value)
        if function not in functions:
            found.append(f"{file}::{function}")
        found += [f"{file}: {row}" for row in re.findall(r'"([^"]+)"', rows) if row not in strings]
    return found


def test_every_test_and_row_of_the_page_exists() -> None:
    page = PAGE.read_text()
    assert len(REFERENCE.findall(page)) > 100
    assert not missing(page, REPOSITORY)


def test_what_does_not_exist_is_found() -> None:
    file, here = "tests/docs/test_cases.py", "test_what_does_not_exist_is_found"
    page = f'`{file}::test_x`, `{file}::{here}` "no such", `tests/no.py::test_y`'
    assert missing(page, REPOSITORY) == [f"{file}::test_x", f"{file}: no such", "tests/no.py::test_y"]
