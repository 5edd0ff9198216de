"""No code that reads a checkpoint, data or a configuration imports a way to unpickle."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import zerotrain.runtime.checkpoint as package

pytestmark = pytest.mark.unit


FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN_CALLS = {"torch.load", "torch.save", "np.load", "numpy.load", "dist.all_gather_object"}
FORBIDDEN_CALLS |= {"dist.broadcast_object_list", "dist.gather_object", "dist.scatter_object_list"}
LAST_NAMES = {name.rpartition(".")[2] for name in FORBIDDEN_CALLS}

RUNTIME = Path(package.__file__).resolve().parents[1]


def unpickling(source: str) -> list[str]:
    """Return every import and call in `source` that can unpickle."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(str(node.module))
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in LAST_NAMES  # of forbidden names; unparsing all expressions takes long
            and ast.unparse(node) in FORBIDDEN_CALLS
        ):
            found.append(ast.unparse(node))
    return found


def test_the_check_finds_what_it_looks_for() -> None:
    assert unpickling("import pickle") == ["pickle"]
    assert unpickling("from pickle import loads as harmless") == ["pickle"]
    assert unpickling("def f(p):\n    return torch.load(p, weights_only=False)") == ["torch.load"]
    assert unpickling("json.load(file)") == []


RESTRICTED = RUNTIME / "checkpoint" / "from_deepspeed"
"""The importing process: torch's restricted unpickler, in one file that no rank imports."""


FOLDERS = sorted({path.relative_to(RUNTIME).parts[0] for path in RUNTIME.glob("*/**/*.py")})


# By folder, as to parse all files takes longer than a unit test may.
@pytest.mark.parametrize("pattern", ["*.py", *(f"{folder}/**/*.py" for folder in FOLDERS)])
def test_runtime_never_unpickles(pattern: str) -> None:
    files = sorted(RUNTIME.glob(pattern))
    assert files
    found = {path: names for path in files if (names := unpickling(path.read_text()))}
    found.pop(RESTRICTED / "pickles.py", None)
    assert found == {}


def test_the_restricted_unpickler_takes_weights_only() -> None:
    source = (RESTRICTED / "pickles.py").read_text()
    assert unpickling(source) == ["torch.load"]
    (call,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert "weights_only=True" in {ast.unparse(keyword) for keyword in call.keywords}


def test_only_the_importing_process_has_that_file() -> None:
    importers = {
        name: sorted(
            path.relative_to(RESTRICTED).as_posix()
            for path in RUNTIME.rglob("*.py")
            if f"from_deepspeed.{name} import" in path.read_text()
        )
        for name in ("pickles", "convert")
    }
    assert importers == {"pickles": ["convert.py"], "convert": ["__main__.py"]}
