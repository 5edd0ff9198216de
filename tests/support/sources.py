"""Python files of the repository, for the checks of its texts and names."""

from __future__ import annotations

from collections.abc import Iterator

from tests.support.devcluster import REPOSITORY

PARTS = (
    "operator/**/*.py",
    "runtime/zerotrain/[!r]*/**/*.py",
    "runtime/zerotrain/runtime/*.py",
    "runtime/zerotrain/runtime/[a-m]*/**/*.py",
    "runtime/zerotrain/runtime/[!a-m]*/**/*.py",
    "deploy/**/*.py",
    "tests/*.py",
    "tests/operator/**/*.py",
    "tests/runtime/**/*.py",
    "tests/[!or]*/**/*.py",
)
"""Patterns that cover all files, each few enough for one unit test."""


def python_files(part: str) -> Iterator[tuple[str, str]]:
    """Yield the path in the repository and the text of every file of one of `PARTS`."""
    for path in sorted(REPOSITORY.glob(part)):
        yield str(path.relative_to(REPOSITORY)), path.read_text()
