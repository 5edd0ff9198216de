"""Every page of docs/ is found from docs/README.md, and the list of decisions is complete and in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_repo_shape import ROOT

pytestmark = pytest.mark.unit


DOCS = ROOT / "docs"
INDEXED = {"adr": "adr/README.md", "runbooks": "alerts.md"}
"""Folders whose pages have an index of their own, and that index; the map links the index."""

_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
_DECISION = re.compile(r"^\| \[(\d{4})\]\(([^)]+)\) \| (.+?) \| .*\|$", flags=re.MULTILINE)
_TITLE = re.compile(r"# (\d{4}) (.+)")


def linked(index: Path) -> set[Path]:
    """The files that a page links."""
    return {(index.parent / target).resolve() for target in _LINK.findall(index.read_text())}


def unlisted(folder: Path) -> list[str]:
    """Pages below a folder of documents that its README.md does not link, and whose folder has no index."""
    found = linked(folder / "README.md")
    pages = {path for path in folder.rglob("*.md") if path.relative_to(folder).parts[0] not in INDEXED}
    wanted = {*pages, *(folder / index for index in INDEXED.values())} - {folder / "README.md"}
    return sorted(str(path.relative_to(folder)) for path in wanted if path.resolve() not in found)


def index_of(folder: Path) -> list[tuple[str, str, str]]:
    """Number, file and title of every row of an index of decisions."""
    return _DECISION.findall((folder / "README.md").read_text())


def decisions(folder: Path) -> list[tuple[str, str, str]]:
    """The same, by the files themselves, in their order."""
    found = []
    for path in sorted(folder.glob("[0-9]*.md")):
        title = _TITLE.match(path.read_text())
        assert title is not None, f"{path.name} begins with no title of the form '# NUMBER TITLE'"
        assert path.name.startswith(title[1]), f"{path.name} has the title of {title[1]}"
        found.append((title[1], path.name, title[2]))
    return found


def test_the_map_links_every_page() -> None:
    assert unlisted(DOCS) == []


@pytest.mark.parametrize("folder", INDEXED)
def test_the_index_of_a_folder_links_every_page_of_it(folder: str) -> None:
    index = DOCS / INDEXED[folder]
    pages = {path.resolve() for path in (DOCS / folder).glob("*.md")} - {index.resolve()}
    assert len(pages) > 30
    assert {path.name for path in pages - linked(index)} == set()


def test_the_list_of_decisions_has_each_file_once_in_order_with_its_title() -> None:
    assert len(decisions(DOCS / "adr")) > 40
    assert index_of(DOCS / "adr") == decisions(DOCS / "adr")


def test_every_decision_has_a_number_of_its_own() -> None:
    """Numbers of decisions that were merged into a later one are free, and stay so."""
    numbers = [int(number) for number, _, _ in decisions(DOCS / "adr")]
    assert numbers == sorted(set(numbers))
    assert not {23, 31, 32, 33, 35, 36, 37, 39}.intersection(numbers)


def test_the_checks_see_what_is_missing(tmp_path: Path) -> None:
    for name in ("README.md", "a.md", "b.md", "alerts.md", "adr/README.md", "adr/0001-x.md", "runbooks/R.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# 0001 X\n")
    (tmp_path / "README.md").write_text("[a](a.md) [the web](https://example.org/b.md)")
    (tmp_path / "adr" / "README.md").write_text("| [0001](0001-x.md) | Y | |\n")
    assert unlisted(tmp_path) == ["adr/README.md", "alerts.md", "b.md"]
    assert index_of(tmp_path / "adr") != decisions(tmp_path / "adr") == [("0001", "0001-x.md", "X")]
