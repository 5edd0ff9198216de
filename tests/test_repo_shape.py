"""The shape of the tree: sizes, the namespace package, and no pickle where state is loaded."""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE_ROOTS = ("operator", "runtime", "deploy")
MAX_FILE_LINES = 600
MAX_TEST_LINES = 500
MAX_NATIVE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8

NAMESPACE_FOLDERS = ("operator", "operator/zerotrain", "runtime", "runtime/zerotrain")
TOP_LEVEL = {
    *("operator", "runtime", "csrc", "deploy", "charts", "crds", "tests", "dashboards", "docs", ".ci"),
    *("pyproject.toml", "README.md", "Makefile", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"),
    *(".gitignore", ".importlinter"),
}


def tracked(*suffixes: str) -> list[Path]:
    """Return the files of the repository, including new ones that git does not ignore."""
    return [file for file in listing() if file.name.endswith(suffixes or "")]


@cache
def listing() -> tuple[Path, ...]:
    ignored = (ROOT / ".gitignore").read_text().split()
    files: list[Path] = []
    for base, folders, names in os.walk(ROOT):
        here = Path(base)
        folders[:] = sorted(name for name in folders if not is_ignored(here / name, ignored, "/"))
        files += [here / name for name in sorted(names) if not is_ignored(here / name, ignored, "")]
    return tuple(files)


def is_ignored(path: Path, patterns: list[str], end: str) -> bool:
    """Return whether a pattern of .gitignore matches: a name, with a leading `/` for one at the top and a
    trailing one for a folder.
    """
    if path.name == ".git":
        return True
    names = {
        path.name,
        path.name + end,
        *([f"/{path.name}", f"/{path.name}{end}"] if path.parent == ROOT else []),
    }
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


@pytest.mark.ranks
def test_the_listing_is_gits() -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = {ROOT / name for name in out.split("\0") if name}
    assert set(tracked()) == {file for file in listed if file.is_file()}


def line_limit(path: Path) -> int:
    if path.suffix in {".cpp", ".hpp", ".cu", ".inc"}:
        return MAX_NATIVE_LINES
    return MAX_TEST_LINES if path.relative_to(ROOT).parts[0] == "tests" else MAX_FILE_LINES


def too_long(files: list[Path]) -> list[str]:
    counted = {path: len(path.read_text().splitlines()) for path in files}
    return [
        f"{path}: {n} lines, limit {line_limit(path)}" for path, n in counted.items() if n > line_limit(path)
    ]


def parsed(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def oversized_definitions(nodes: list[ast.AST], name: str) -> list[str]:
    """Return functions and parameter lists above the limits; frozen records may have many fields."""
    found = []
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            arguments = [a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
            parameters = [a for a in arguments if a not in {"self", "cls"}]
            if lines > MAX_FUNCTION_LINES:
                found.append(
                    f"{name}:{node.lineno} {node.name} has {lines} lines, limit {MAX_FUNCTION_LINES}"
                )
            if len(parameters) > MAX_PARAMETERS and not is_command(node):
                found.append(f"{name}:{node.lineno} {node.name} has {len(parameters)} parameters")
    return found


def is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether it is a typer command, whose parameters are the options of the command line."""
    return any("command" in ast.unparse(decorator) for decorator in node.decorator_list)


@pytest.mark.unit
def test_no_file_is_too_long() -> None:
    files = tracked(".py", ".cpp", ".hpp", ".inc", ".cu", ".go")
    assert len(files) > 20, "the listing found hardly anything: it checks nothing"
    assert too_long(files) == []


PARTS = sorted(
    {
        path.parent.relative_to(ROOT).parts[:4]
        for path in tracked(".py")
        if path.parts[len(ROOT.parts)] in SOURCE_ROOTS
    }
)
"""Folders of the product, so that no single test checks all of it."""


def part(parts: tuple[str, ...]) -> dict[str, str]:
    """Return the text of the Python files of one of PARTS."""
    files = [path for path in tracked(".py") if path.parent.relative_to(ROOT).parts[:4] == parts]
    return {str(path.relative_to(ROOT)): path.read_text() for path in files}


@pytest.mark.unit
@pytest.mark.parametrize("parts", PARTS, ids="/".join)
def test_definitions_are_small_and_nothing_unsafe_is_loaded(parts: tuple[str, ...]) -> None:
    """One parse of each file serves all checks of its syntax, since parsing takes long."""
    found = []
    for name, text in part(parts).items():
        nodes = parsed(text)
        found += oversized_definitions(nodes, name)
        if parts[0] == "deploy":
            continue
        found += [f"{name}: {word} can run code while it loads" for word in unsafe_loads(nodes)]
        if name not in JSON_READERS:
            use = "use zerotrain.contract.strict_json"
            found += [f"{name}: {word}: {use}" for word in bare_json_reads(nodes)]
    assert found == []


@pytest.mark.unit
@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("def f():\n" + "    x = 1\n" * 70, "lines"),
        ("def f(" + ", ".join(f"a{i}" for i in range(9)) + "): ...", "parameters"),
    ],
)
def test_the_size_check_sees_a_violation(source: str, word: str) -> None:
    assert any(word in line for line in oversized_definitions(parsed(source), "planted.py"))


@pytest.mark.unit
def test_the_namespace_package_has_no_init() -> None:
    """`operator/__init__.py` would shadow the standard library's `operator`."""
    assert [f for f in NAMESPACE_FOLDERS if (ROOT / f / "__init__.py").exists()] == []


@pytest.mark.unit
def test_top_level_is_as_agreed() -> None:
    names = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert names <= TOP_LEVEL, f"unexpected at the top level: {sorted(names - TOP_LEVEL)}"


def last_name(node: ast.expr) -> str:
    """Return the last name of an expression, c of `a.b.c`: unparsing every expression takes long."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def unsafe_loads(nodes: list[ast.AST]) -> list[str]:
    """Return the names of modules or calls that can run code while loading."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [
                a.name for a in node.names if a.name.split(".")[0] in {"pickle", "dill", "shelve", "marshal"}
            ]
        if isinstance(node, ast.ImportFrom) and node.module in {"pickle", "dill", "shelve", "marshal"}:
            found.append(node.module)
        # torch's restricted unpickler (weights_only) builds tensors and plain data alone.
        if (
            isinstance(node, ast.Call)
            and last_name(node.func) in {"load", "save", "eval", "exec"}
            and ast.unparse(node.func) in {"torch.load", "torch.save", "eval", "exec"}
            and "weights_only=True" not in {ast.unparse(item) for item in node.keywords}
        ):
            found.append(ast.unparse(node.func))
    return found


JSON_READERS = {
    "runtime/zerotrain/contract/strict_json.py",
    "operator/zerotrain/operator/cluster/json_codec.py",  # the API server's answers, by orjson
}


def bare_json_reads(nodes: list[ast.AST]) -> list[str]:
    """Return the names by which JSON is read without bounds on size and depth."""
    found = []
    names = {"load", "loads", "JSONDecoder"}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in names:
            base = ast.unparse(node.value)
            if base in {"json", "orjson", "json.decoder"} or node.attr == "JSONDecoder":
                found.append(ast.unparse(node))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in {"json", "orjson"}:
            found += [alias.name for alias in node.names if alias.name in names | {"decoder"}]
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name == "json" and alias.asname]
    return found


@pytest.mark.unit
@pytest.mark.parametrize(
    "source",
    [
        "import json\nx = json.loads(text)",
        "import json\nx = json.load(file)",
        "import orjson\nx = orjson.loads(text)",
        "from json import loads",
        "import json as j",
        "import json\nread = json.JSONDecoder().decode",
        "from json.decoder import JSONDecoder",
    ],
)
def test_the_json_check_sees_a_violation(source: str) -> None:
    assert bare_json_reads(parsed(source))


@pytest.mark.unit
def test_the_pickle_check_sees_a_violation() -> None:
    found = {
        "import torch\ntorch.load('x', weights_only=False)": ["torch.load"],
        "import torch\ntorch.load('x', weights_only=True)": [],
        "import pickle\nimport torch\ntorch.load('x')": ["pickle", "torch.load"],
    }
    assert {source: unsafe_loads(parsed(source)) for source in found} == found


ON_BUSY_MACHINES = {
    # The kernel gives the port to another program before a server binds it; tests/support/ports.py claims its
    # ports.
    r"\.bind\(\(\"127\.0\.0\.1\", 0\)\)": "take a port from tests.support.ports",
    r"assert \S*(monotonic|perf_counter|time)\(\) - \S+ <": "judge what happened, not how long it took",
}


def unfit_for_busy_machines(text: str) -> list[str]:
    return [advice for pattern, advice in ON_BUSY_MACHINES.items() if re.search(pattern, text)]


@pytest.mark.unit
def test_no_test_depends_on_how_busy_the_machine_is() -> None:
    files = [path for path in tracked(".py") if path.is_relative_to(ROOT / "tests")]
    others = [path for path in files if "benchmarks" not in path.parts and path.name != "ports.py"]
    found = {str(path): advice for path in others if (advice := unfit_for_busy_machines(path.read_text()))}
    assert found == {}


@pytest.mark.unit
@pytest.mark.parametrize(
    "text", [f'probe.bind(("127.0.0.1", {0}))', f"assert time.monotonic() {'-'} started < 5"]
)
def test_the_rule_about_busy_machines_bites(text: str) -> None:
    assert unfit_for_busy_machines(text)
