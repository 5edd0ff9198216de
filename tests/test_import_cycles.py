"""Modules import each other in one direction, also by imports in functions and for type checkers."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks  # reads every module, which takes over a second

ROOT = Path(__file__).parent.parent
ROOTS = ("operator", "runtime")
ZERO = "zerotrain.runtime.zero"
KNOWN = (
    # The sharded model and its hooks, passes and units hold each other.
    *((f"{ZERO}.{name}", ZERO) for name in ("build", "hooks", "passes", "state_access", "uses", "writes")),
)
"""Imports that are part of a cycle, as module and the module or package that it imports."""


def module_files(root: Path) -> dict[str, Path]:
    """Return the files of all modules below the source roots, by the name of the module."""
    found = {}
    for base in ROOTS:
        for path in (root / base).rglob("*.py"):
            parts = path.relative_to(root / base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_names(name: str, path: Path) -> Iterable[str]:
    """Iterate over everything that a module imports anywhere, each as module or as module and attribute."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{item.name}" for item in node.names)


def import_graph(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return the modules that each module imports, of these modules alone."""
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        given = imported_names(name, path)
        found = {each if each in files else each.rpartition(".")[0] for each in given}
        graph[name] = (found & files.keys()) - {name}
    return graph


@cache
def own_graph() -> dict[str, set[str]]:
    return import_graph(module_files(ROOT))


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one cycle, the first one again at its end; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def without_known(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without the imports that are known to be part of a cycle."""
    return {
        name: {
            target
            for target in targets
            if not any(name == source and f"{target}.".startswith(f"{known}.") for source, known in KNOWN)
        }
        for name, targets in graph.items()
    }


def test_no_modules_import_each_other() -> None:
    assert cycle(without_known(own_graph())) == []


def test_every_known_import_exists() -> None:
    graph = own_graph()
    unused = [
        (source, known)
        for source, known in KNOWN
        if not any(f"{target}.".startswith(f"{known}.") for target in graph.get(source, ()))
    ]
    assert unused == []


@pytest.mark.parametrize(
    "text",
    [
        "from zerotrain.cli.one import x",
        "from .one import x",
        "from zerotrain.cli import one",
        "import zerotrain.cli.one",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .one import x",
        "def later():\n    from . import one",
    ],
)
def test_the_check_sees_a_cycle(text: str, tmp_path: Path) -> None:
    package = tmp_path / "operator" / "zerotrain" / "cli"
    package.mkdir(parents=True)
    (package / "one.py").write_text("from zerotrain.cli import two")
    (package / "two.py").write_text(text)
    found = cycle(import_graph(module_files(tmp_path)))
    assert sorted(set(found)) == ["zerotrain.cli.one", "zerotrain.cli.two"]
    (package / "two.py").write_text("import json")
    assert cycle(import_graph(module_files(tmp_path))) == []
