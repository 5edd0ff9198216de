"""docs/architecture.md names paths that exist, and its drawings have the syntax that GitHub renders."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_repo_shape import ROOT, TOP_LEVEL

pytestmark = pytest.mark.unit


PAGE = ROOT / "docs" / "architecture.md"
DRAWINGS = 3
MIN_EDGES = 15
"""Minimum number of arrows of a drawing."""

_CODE = re.compile(r"`([\w./-]+)`")
_DRAWING = re.compile(r"^```mermaid\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_LABEL = r'"([^"]+)"'
_NODE = re.compile(rf"([a-z]\w*)(?:\[{_LABEL}\]|\{{{_LABEL}\}}|\[\({_LABEL}\)\])")
_GROUP = re.compile(rf"subgraph ([a-z]\w*)\[{_LABEL}\]")
_EDGE = re.compile(rf"([a-z]\w*) (?:-->|-\.->)(?:\|{_LABEL}\|)? ([a-z]\w*)")
_HEAD = re.compile(r"flowchart (TB|LR)")
_LIST = re.compile(r"\d+\.\s|[-*]\s")
RESERVED = {"end", "graph", "subgraph", "flowchart", "class", "style", "default", "click"}


def paths(text: str) -> list[str]:
    """Return the texts in code that begin with a folder or file of the top level."""
    return [word for word in _CODE.findall(text) if word.split("/")[0] in TOP_LEVEL]


def missing(text: str, root: Path) -> list[str]:
    """Named paths that do not exist; a bare file name must be one beside a path that was named before it."""
    found, folder = [], root
    for word in _CODE.findall(_DRAWING.sub("", text)):
        if word.split("/")[0] in TOP_LEVEL:
            path = root / word
            folder = path if path.is_dir() else path.parent
        elif re.fullmatch(r"\w+\.py", word):
            path = folder / word
        else:
            continue
        if not path.exists():
            found.append(word)
    return found


def edges(drawing: str) -> list[tuple[str, str]]:
    """Return the two ends of every arrow."""
    matches = (_EDGE.fullmatch(line.strip()) for line in drawing.splitlines())
    return [(match[1], match[3]) for match in matches if match]


def mistakes(drawing: str) -> list[str]:
    """Lines of no known form, nodes without a definition or an edge, labels that GitHub does not render."""
    lines = [line.strip() for line in drawing.splitlines()]
    found = [] if _HEAD.fullmatch(lines[0]) else [f"begins with {lines[0]!r}"]
    nodes: list[str] = []
    depth = 0
    for line in lines[1:]:
        match = _NODE.fullmatch(line) or _GROUP.fullmatch(line) or _EDGE.fullmatch(line)
        depth += (_GROUP.fullmatch(line) is not None) - (line == "end")
        if _NODE.fullmatch(line) or _GROUP.fullmatch(line):
            nodes.append(line.removeprefix("subgraph ").split("[")[0].split("{")[0])
        if match is None and line != "end":
            found.append(f"cannot be read: {line!r}")
        # GitHub shows "Unsupported markdown: list" in place of such a label.
        found += [f"a list as a label: {label!r}" for label in re.findall(_LABEL, line) if _LIST.match(label)]
    if depth != 0:
        found.append("subgraph and end do not match")
    groups = {match[1] for line in lines if (match := _GROUP.fullmatch(line))}
    used = {name for edge in edges(drawing) for name in edge}
    found += [f"{name} is defined more than once" for name in sorted(set(nodes)) if nodes.count(name) > 1]
    found += [f"{name} is a word of mermaid" for name in sorted(RESERVED & set(nodes))]
    found += [f"{name} is not defined" for name in sorted(used - set(nodes))]
    found += [f"{name} has no edge" for name in sorted(set(nodes) - used - groups)]
    return found


def test_every_path_exists() -> None:
    text = PAGE.read_text()
    assert len(paths(text)) > 40
    assert missing(text, ROOT) == []


def test_the_drawings_are_sound() -> None:
    drawings = _DRAWING.findall(PAGE.read_text())
    assert len(drawings) == DRAWINGS
    assert [mistakes(drawing) for drawing in drawings] == [[]] * DRAWINGS
    assert [drawing for drawing in drawings if len(edges(drawing)) < MIN_EDGES] == []


def test_the_check_sees_a_path_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").touch()
    text = (
        "`docs/a.md`, `docs/b.md`, `docs`, `no.py`, `zerotrain run`, `/metrics`\n```mermaid\n`docs/c`\n```\n"
    )
    assert missing(text, tmp_path) == ["docs/b.md", "no.py"]


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("a --> c", "c is not defined"),
        ('c["x"]', "c has no edge"),
        ('a["y"]', "a is defined more than once"),
        ('subgraph s["t"]', "subgraph and end do not match"),
        ("a -> b", "cannot be read: 'a -> b'"),
        ("a[x (y)] --> b", "cannot be read: 'a[x (y)] --> b'"),
        ('a -->|"1. go"| b', "a list as a label: '1. go'"),
    ],
)
def test_the_check_sees_a_mistake(line: str, mistake: str) -> None:
    sound = 'flowchart TB\n  a["x"]\n  b{"y"}\n  a -->|"(1) go"| b\n'
    assert mistakes(sound) == []
    assert mistakes(f"{sound}  {line}\n") == [mistake]
