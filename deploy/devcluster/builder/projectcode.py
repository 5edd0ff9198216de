"""The image's second layer: the project's own packages, as an installed wheel would place them.

The environment holds an editable install, which points into the clone. The image gets real packages instead,
in a layer of their own, so that an edit costs a second and not a copy of every dependency.
"""

import importlib.util
import marshal
import os
import sys
import tomllib
from pathlib import Path

from .filetree import FileTree
from .pythonenv import PROJECT, PythonEnvironment, distribution_files

_METADATA = ("METADATA", "entry_points.txt", "WHEEL")


def add_project(tree: FileTree, environment: PythonEnvironment, repository: Path) -> None:
    """Add what a wheel of the project would install: packages, metadata, compiled modules and commands."""
    with (repository / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["scikit-build"]["wheel"]["packages"]
    site = environment.site_packages[-1]  # platlib: the folder of a wheel with compiled modules
    for target, source in sorted(packages.items()):
        _add_package(tree, repository / source, f"{site}/{target}", environment.cache_tag)
    for folder in environment.site_packages:
        for path in sorted(distribution_files(folder, PROJECT)):
            if _belongs(path, folder, environment) and os.path.isfile(path):
                mode = 0o755 if os.access(path, os.X_OK) else 0o644
                tree.add_bytes(path, Path(path).read_bytes(), mode=mode)


def _belongs(path: str, site: str, environment: PythonEnvironment) -> bool:
    """Return whether a file of the installed project is needed. Hooks that lead into the clone are not."""
    if path.startswith(os.path.join(environment.prefix, "bin", "")):
        return True
    if path.startswith(os.path.join(site, PROJECT, "")):
        return path.endswith(".so")
    return os.path.dirname(path).endswith(".dist-info") and os.path.basename(path) in _METADATA


def _add_package(tree: FileTree, source: Path, target: str, cache_tag: str) -> None:
    for base, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        inside = os.path.normpath(os.path.join(target, os.path.relpath(base, source)))
        for name in sorted(names):
            if name.endswith(".pyc"):
                continue
            body = Path(base, name).read_bytes()
            tree.add_bytes(f"{inside}/{name}", body)
            compiled = _compiled(body, f"{inside}/{name}", cache_tag) if name.endswith(".py") else None
            if compiled is not None:
                tree.add_bytes(f"{inside}/__pycache__/{name[:-3]}.{cache_tag}.pyc", compiled)


def _compiled(source: bytes, path: str, cache_tag: str) -> bytes | None:
    """Return a .pyc that is never checked against its source, or None if it cannot be made here.

    The user of a pod cannot write into the image, so without it every process would compile the project
    again.
    """
    if cache_tag != sys.implementation.cache_tag:
        return None  # another interpreter runs this builder
    try:
        code = compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None  # the import reports the error, with its line
    unchecked_hash = (1).to_bytes(4, "little")
    return (
        importlib.util.MAGIC_NUMBER
        + unchecked_hash
        + importlib.util.source_hash(source)
        + marshal.dumps(code)
    )
