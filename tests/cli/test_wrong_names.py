"""Commands without a cluster, given a file, folder or word that does not exist: code, cause, advice."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from tests.client.test_errors_live import ABOUT_A_JOB, check_failure, with_a_cluster
from tests.support.commands import zerotrain
from zerotrain.cli.document import leaves
from zerotrain.cli.main import app
from zerotrain.client.command_exits import CommandExit

pytestmark = pytest.mark.unit


NONE = "none"
"""Name of no file, folder or word."""

GIVEN = {
    "run": ("./none",),
    "launch": ("./none",),
    "plan": ("./none",),
    "submit": ("./none",),
    "report": ("./none",),
    "init": ("none/job.yaml", "--model", "gpt-1m", "--gpu", "none"),
    "config show": ("./none",),
    "checkpoint ls": ("./none",),
    "checkpoint verify": ("./none",),
    "checkpoint export": ("./none", "out"),
    "checkpoint diff": ("./none", "./none"),
    "checkpoint import": ("./none", "out"),
    "zero-to-fp32": ("./none", "out"),
    "explain alert": (NONE,),
    "explain exit-code": (NONE,),
    "explain condition": (NONE,),
    "explain metric": (NONE,),
    "explain key": (NONE,),
    "explain memory": (NONE,),
}
"""Command -> its arguments, in an empty folder."""

ANSWER = {"doctor", "config check"}
"""Commands that report problems as rows of their tables, with the exit code of those."""

NAMELESS = {"env", "version", "explain exit-codes"}
"""Commands that take no name of anything."""


def test_no_command_is_left_out() -> None:
    every = set(dict(leaves(typer.main.get_command(app))))
    assert set(GIVEN) | ANSWER | NAMELESS | with_a_cluster(typer.main.get_command(app)) == every
    assert set(GIVEN) & set(ABOUT_A_JOB) == {"report"}


@pytest.mark.parametrize("command", sorted(GIVEN))
def test_what_is_not_there_is_named_with_the_way_out(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_failure(zerotrain(*command.split(), *GIVEN[command]), CommandExit.INVALID, NONE)
    assert list(tmp_path.iterdir()) == [], "something was written"


def test_tables_report_what_does_not_exist(tmp_path: Path) -> None:
    missing = tmp_path / NONE
    done = zerotrain("config", "check", missing, env={"COLUMNS": "300"})
    assert (done.code, str(missing) in done.out) == (CommandExit.INVALID, True)
    done = zerotrain("doctor", "--folder", missing, env={"COLUMNS": "300"})
    assert (done.code, str(missing) in done.out) == (1, True)
