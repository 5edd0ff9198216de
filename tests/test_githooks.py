"""deploy/githooks/commit-msg refuses titles that break the rules of CONTRIBUTING.md, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_repo_shape import ROOT

HOOK = ROOT / "deploy" / "githooks" / "commit-msg"


def run_hook(folder: Path, message: str) -> tuple[int, str]:
    """Exit code and errors of the hook, called as git does."""
    file = folder / "COMMIT_EDITMSG"
    file.write_text(message, encoding="utf-8")
    done = subprocess.run([sys.executable, HOOK, file], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.unit
def test_git_can_execute_it_and_the_rules_name_it() -> None:
    assert os.access(HOOK, os.X_OK)
    assert HOOK.read_text().startswith("#!/usr/bin/env python3\n")
    assert (
        f"git config core.hooksPath {HOOK.parent.relative_to(ROOT)}" in (ROOT / "CONTRIBUTING.md").read_text()
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    "message",
    [
        "Restart all ranks after a hang\n",
        "Process jobs of one namespace in turn\n\nThe body may have long lines.\n",
        "Feed the queue from one watch\n# Please enter the commit message for your changes.\n",
        f"Name {'x' * 61} again\n",
        f'Revert "{"x" * 80}"\n\nThis reverts commit 0123456.\n',
        "fixup! Restart all ranks after a hang\n",
        "\n# Nothing but comments\n",
    ],
)
def test_good_titles_pass(tmp_path: Path, message: str) -> None:
    assert run_hook(tmp_path, message) == (0, "")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (f"Name {'x' * 62} again\n", "it has 73 characters; at most 72 are allowed"),
        ("Added a watch for nodes\n", "it is not imperative"),
        ("Adds a watch for nodes\n", "it is not imperative"),
        ("Adding a watch for nodes\n", "it is not imperative"),
        ("restart all ranks after a hang\n", "it begins with no capital letter"),
        ("Restart all ranks after a hang.\n", "it ends with a full stop"),
        ("WIP on the watch for nodes\n", "it does not say what changes"),
        ("Fix bug\n", "it does not say what changes"),
        ("Restart all ranks\nafter a hang\n", "the line below it is not empty"),
    ],
)
def test_bad_titles_are_refused_with_the_reason(tmp_path: Path, message: str, reason: str) -> None:
    code, errors = run_hook(tmp_path, message)
    assert code == 1
    assert f"commit title: {reason}" in errors
    assert len(errors.splitlines()) == 1
