"""Every command of the whole tree: help with an example that works, and the generated reference."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main

from tests.support.commands import zerotrain
from zerotrain.cli.document import leaves, reference
from zerotrain.cli.main import app, program_name
from zerotrain.client.exit_codes import COMMAND_EXITS, CommandExit
from zerotrain.contract.exit_codes import EXIT_CODES, ExitCode

DOCUMENT = Path(__file__).parents[2] / "docs" / "cli.md"


TREE = dict(leaves(typer.main.get_command(app)))


def problems_of(path: str, command: Any) -> list[str]:
    """What a reader of --help would miss."""
    found = []
    example = (command.epilog or "").strip()
    if not example.startswith(f"Example: zerotrain {path}"):
        found.append(f"{path}: no example")
    if not (command.help or "").strip():
        found.append(f"{path}: no help")
    for parameter in command.params:
        told = parameter.param_type_name == "argument" or parameter.hidden or parameter.help
        if not told:
            found.append(f"{path}: {parameter.name} has no help")
    return found


def test_every_command_says_what_it_does_and_gives_an_example() -> None:
    assert len(TREE) > 20
    assert [line for path, command in TREE.items() for line in problems_of(path, command)] == []


def test_the_help_check_sees_a_violation() -> None:
    option = SimpleNamespace(name="flag", param_type_name="option", help=None, hidden=False)
    bare = SimpleNamespace(epilog=None, help=" ", params=[option])
    assert problems_of("bare", bare) == [
        "bare: no example",
        "bare: no help",
        "bare: flag has no help",
    ]


@pytest.mark.parametrize("path", sorted(TREE))
def test_help_is_printed_and_its_example_is_understood(path: str) -> None:
    done = zerotrain(*path.split(), "--help", env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    example = (TREE[path].epilog or "").removeprefix("Example: ").strip()
    assert f"Example: {' '.join(example.split())}" in text
    words = shlex.split(example)[1 + len(path.split()) :]
    # Click itself reads the words: an option that does not exist, or a value of the wrong kind, ends here.
    assert TREE[path].make_context(path, words).command is TREE[path]


def test_the_reference_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == reference(), "python -m zerotrain.cli.document > docs/cli.md"


def test_no_exit_code_means_two_things() -> None:
    ours = {int(code) for code in CommandExit} - {int(ExitCode.BAD_CONFIG)}
    assert ours.isdisjoint({row.code for row in EXIT_CODES})
    assert {row.code for row in COMMAND_EXITS} == {int(code) for code in CommandExit}
    assert int(CommandExit.INVALID) == int(ExitCode.BAD_CONFIG)


@pytest.mark.parametrize(
    ("path", "name"),
    [("/usr/bin/zerotrain", "zerotrain"), ("/x/kubectl-zerotrain", "kubectl zerotrain")],
)
def test_the_plugin_calls_itself_as_kubectl_does(path: str, name: str) -> None:
    assert program_name(path) == name


def test_a_wrong_option_ends_with_the_code_of_usage() -> None:
    done = zerotrain("get", "--nonsense")
    assert done.code == CommandExit.USAGE
    assert "--nonsense" in done.err
