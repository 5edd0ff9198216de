"""docs/security.md: every promise names tests, and every test that it names exists and tests something."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_repo_shape import ROOT

pytestmark = pytest.mark.unit


PAGE = ROOT / "docs" / "security.md"
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>\.\./tests/[^)]+)\)")


def promises(text: str) -> list[list[str]]:
    """Return the rows of the table of threats: threat, promise, tests."""
    table = text.split("## Threats and promises", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows[1:]]


def weak_rows(text: str, folder: Path) -> list[str]:
    """Return the threats whose promise has no test, or one that does not exist."""
    return [threat for threat, _, tests in promises(text) if not _holds(tests, folder)]


def _holds(tests: str, folder: Path) -> bool:
    links = list(_LINK.finditer(tests))
    return bool(links) and all(_is_test(folder / link["target"], link["text"]) for link in links)


def _is_test(path: Path, text: str) -> bool:
    return (
        path.is_file()
        and path.as_posix().endswith(f"/{text}")
        and re.search(r"^(async )?def test_", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        is not None
    )


def test_every_promise_is_tested() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(promises(text)) >= 15
    assert weak_rows(text, PAGE.parent) == []


def test_every_row_has_three_parts() -> None:
    assert {len(row) for row in promises(PAGE.read_text(encoding="utf-8"))} == {3}


def test_the_check_sees_a_promise_without_a_test(tmp_path: Path) -> None:
    table = "## Threats and promises\n\n| Threat | Promise | Tested by |\n|---|---|---|\n"
    for name in ("tests", "docs"):
        (tmp_path / name).mkdir()
    (tmp_path / "tests" / "test_real.py").write_text('"""x"""\ndef test_x(): ...\n')
    rows = {
        "a": "trust us",
        "b": "[test_gone.py](../tests/test_gone.py)",
        "c": "[test_real.py](../tests/test_real.py)",
    }
    text = table + "".join(f"| {name} | p | {tests} |\n" for name, tests in rows.items())
    assert weak_rows(text, tmp_path / "docs") == ["a", "b"]
