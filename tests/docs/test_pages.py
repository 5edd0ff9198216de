"""Console blocks of the pages that need nothing but this machine, executed; other tests execute the rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.console import Shell, blocks
from tests.test_repo_shape import ROOT, tracked

pytestmark = pytest.mark.ranks


ELSEWHERE = {
    "docs/quickstart.md": "tests/docs/test_quickstart.py",
    "docs/dashboards.md": "tests/monitoring/test_quickstart_monitoring.py",
}
"""Pages whose blocks need a cluster -> the test that has one."""


_MARK = re.compile(r"<!-- (run: [a-z-]+|not run: \S.*) -->")


def pages() -> list[Path]:
    marked = [path for path in tracked(".md") if "<!-- run: " in path.read_text(encoding="utf-8")]
    return [path for path in marked if str(path.relative_to(ROOT)) not in ELSEWHERE]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_blocks_of_a_page(page: Path) -> None:
    shell = Shell(environ={"PATH": str(ROOT / ".venv" / "bin"), "NO_COLOR": "1", "COLUMNS": "120"})
    for block in blocks(page).values():
        shell.run(block)


def test_pages_for_clusters_are_executed_by_tests_that_exist() -> None:
    for page, test in ELSEWHERE.items():
        if "<!-- run: " in (ROOT / page).read_text(encoding="utf-8"):
            assert Path(page).name in (ROOT / test).read_text(encoding="utf-8"), test


def unmarked(text: str) -> list[str]:
    """Return the first commands of the console blocks that are neither run nor give a reason why not."""
    found = re.finditer(r"^(?P<before>.*)\n```console\n(?P<first>.*)$", text, flags=re.MULTILINE)
    return [match["first"] for match in found if not _MARK.fullmatch(match["before"])]


def test_every_console_block_is_run_or_explains_why_not() -> None:
    """docs/cli.md is left out: it is generated from the commands, whose options test_commands.py checks."""
    texts = {path: path.read_text(encoding="utf-8") for path in tracked(".md") if path.name != "cli.md"}
    assert sum(text.count("```console") for text in texts.values()) > 25
    assert {str(path): found for path, text in texts.items() if (found := unmarked(text))} == {}


def test_a_block_without_a_word_is_seen() -> None:
    block = "```console\n$ zerotrain get\n```\n"
    assert (
        unmarked(f"Text.\n\n{block}<!-- not run: -->\n{block}<!-- run: -->\n{block}")
        == ["$ zerotrain get"] * 3
    )
    assert unmarked(f"<!-- run: get -->\n{block}<!-- not run: needs a GPU -->\n{block}") == []


def test_some_pages_are_executed() -> None:
    assert {"migrating.md", "planner.md", "troubleshooting.md"} <= {page.name for page in pages()}


def test_every_symptom_of_the_troubleshooting_table_has_an_answer() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    table = text.split("## What people meet with DeepSpeed", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 12
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in rows)
