"""A class has few methods, those that it inherits from our own classes included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_repo_shape import PARTS, ROOT, part

pytestmark = pytest.mark.unit

MAX_METHODS = 20
LARGER = {
    "zerotrain.client.cluster.Client": 25,
    "zerotrain.runtime.comm.group.Comm": 26,
}
"""Classes that are still larger, with their number of methods, which must not grow; a smaller one leaves the
table."""
PACKAGE_ROOTS = (ROOT / "operator", ROOT / "runtime", ROOT)

Method = ast.FunctionDef | ast.AsyncFunctionDef


class Modules:
    """Modules of the repository by their dotted names, parsed when they are first asked for."""

    def __init__(self, roots: tuple[Path, ...]) -> None:
        self._roots = roots
        self._trees: dict[str, ast.Module | None] = {}

    def tree(self, module: str) -> ast.Module | None:
        """Return the syntax tree of a module; None for one of another project."""
        if module not in self._trees:
            relative = module.replace(".", "/")
            files = [root / f"{relative}{end}" for root in self._roots for end in (".py", "/__init__.py")]
            found = next((file for file in files if file.is_file()), None)
            self._trees[module] = None if found is None else ast.parse(found.read_text())
        return self._trees[module]

    def find(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """Return the module and the class of ours to which a name (`A` or `alias.A`) refers in a module; None
        for others. What exists for type checkers alone is not looked at."""
        tree, (first, _, rest) = self.tree(module), name.partition(".")
        for node in tree.body if tree else ():
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                if (alias.asname or alias.name) == first:
                    assert isinstance(node, ast.ImportFrom)
                    place = f"{node.module}.{alias.name}" if rest else f"{node.module}"
                    return self.find(place, rest or alias.name)
        return None


@pytest.fixture(scope="module")
def repository() -> Modules:
    """The modules of the repository. Their trees must not outlive this file: garbage collections in later
    tests would walk through millions of nodes."""
    return Modules(PACKAGE_ROOTS)


def is_delegation(method: Method) -> bool:
    """Return whether a method is a public name with a docstring that only calls or reads `self.PART.NAME`."""
    if method.name.startswith("_") and not method.name.endswith("__"):
        return False
    if len(method.body) != 2 or ast.get_docstring(method) is None:
        return False
    statement = method.body[1]
    value = statement.value if isinstance(statement, ast.Return | ast.Expr) else None
    if isinstance(value, ast.Await):
        value = value.value
    target = value.func if isinstance(value, ast.Call) else value
    depth = 0
    while isinstance(target, ast.Attribute):
        target, depth = target.value, depth + 1
    return depth >= 2 and isinstance(target, ast.Name) and target.id == "self"


def methods(modules: Modules, module: str, node: ast.ClassDef) -> dict[str, Method]:
    """Return the methods of a class by name, with those of our classes that it inherits from."""
    found: dict[str, Method] = {}
    for base in reversed(node.bases):
        name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
        if (place := modules.find(module, name)) is not None and place[1] is not node:
            found |= methods(modules, *place)
    return found | {each.name: each for each in node.body if isinstance(each, Method)}


def too_many_methods(modules: Modules, module: str, tree: ast.Module) -> Iterator[str]:
    for node in classes(tree):
        counted = [each for each in methods(modules, module, node).values() if not is_delegation(each)]
        if len(counted) > MAX_METHODS:
            yield f"{module}.{node.name} has {len(counted)} methods, limit {MAX_METHODS}"


def classes(node: ast.AST) -> Iterator[ast.ClassDef]:
    """Yield the classes below a node, without those that exist for type checkers alone."""
    if isinstance(node, ast.ClassDef):
        yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from classes(child)


def module_name(path: str) -> str:
    """Return the dotted name of a file of the repository."""
    parts = Path(path).with_suffix("").parts
    parts = parts[1:] if parts[0] in ("operator", "runtime") else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("parts", PARTS, ids="/".join)
def test_no_class_has_too_many_methods(parts: tuple[str, ...], repository: Modules) -> None:
    names = [module_name(path) for path in part(parts)]
    trees = [(name, tree) for name in names if (tree := repository.tree(name)) is not None]
    assert len(trees) == len(names)
    found = {line for name, tree in trees for line in too_many_methods(repository, name, tree)}
    known = {f"{name} has {count} methods, limit {MAX_METHODS}" for name, count in LARGER.items()}
    assert found == {line for line in known if line.split(" ")[0].rpartition(".")[0] in names}


def planted(folder: Path, **files: str) -> list[str]:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    modules = Modules((folder,))
    trees = {name: modules.tree(name) for name in files}
    return [line for name, tree in trees.items() if tree for line in too_many_methods(modules, name, tree)]


def defined(count: int, *, body: str = "return 1", first: int = 0) -> str:
    return "".join(f"    def m{i}(self):\n        {body}\n" for i in range(first, first + count))


def test_own_and_inherited_methods_are_counted(tmp_path: Path) -> None:
    assert planted(tmp_path, a="class A:\n" + defined(21)) == ["a.A has 21 methods, limit 20"]
    base = "class A:\n" + defined(12)
    files = {
        "one": "from base import A\nclass B(A):\n" + defined(9, first=12),
        "two": "from base import A as C\nfrom typing import Generic\nclass B(Generic[T], C):\n"
        + defined(9, first=12),
        "three": "from package import base\nclass B(base.A):\n" + defined(9, first=12),
        "overriding": "from base import A\nclass B(A):\n" + defined(9),
    }
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "base.py").write_text(base)
    assert planted(tmp_path, base=base, **files) == [
        f"{name}.B has 21 methods, limit 20" for name in ("one", "two", "three")
    ]


@pytest.mark.parametrize(
    ("method", "is_counted"),
    [
        ('def save(self, path):\n        """Save."""\n        return self._saves.save(path)', False),
        ('def stop(self):\n        """Stop."""\n        self._loop.stop()', False),
        ('def lr(self):\n        """Rate."""\n        return self._state.lr', False),
        ("def save(self, path):\n        return self._saves.save(path)", True),
        ('def _save(self, path):\n        """Save."""\n        return self._saves.save(path)', True),
        ('def save(self, path):\n        """Save."""\n        return self.store(path)', True),
        ('def size(self):\n        """Size."""\n        return self._saves.size + 1', True),
        ('def size(self):\n        """Size."""\n        check()\n        return self._saves.size', True),
    ],
)
def test_documented_delegations_are_not_counted(tmp_path: Path, method: str, is_counted: bool) -> None:
    found = planted(tmp_path, a="class A:\n" + defined(20) + f"    {method}\n")
    assert bool(found) is is_counted
