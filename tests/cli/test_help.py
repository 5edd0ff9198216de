"""Every command of the whole tree: help with an example that works, and the generated reference."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main

from tests.support.commands import zerotrain
from zerotrain import cli as zerotrain_cli
from zerotrain.cli.document import leaves, reference
from zerotrain.cli.main import app, program_name
from zerotrain.client import errors as errors_of_client
from zerotrain.client.command_exits import COMMAND_EXITS, CommandExit
from zerotrain.contract.exit_codes import EXIT_CODES, ExitCode
from zerotrain.runtime.checkpoint import errors as errors_of_saves

pytestmark = pytest.mark.unit


DOCUMENT = Path(__file__).parents[2] / "docs" / "cli.md"


TREE = dict(leaves(typer.main.get_command(app)))


def problems_of(path: str, command: Any) -> list[str]:
    """Return what a reader of --help would miss."""
    found = []
    example = (command.epilog or "").strip()
    if not example.startswith(f"Example: zerotrain {path}"):
        found.append(f"{path}: no example")
    if not (command.help or "").strip():
        found.append(f"{path}: no help")
    for parameter in command.params:
        is_described = parameter.param_type_name == "argument" or parameter.hidden or parameter.help
        if not is_described:
            found.append(f"{path}: {parameter.name} has no help")
    return found


def test_every_command_has_a_description_and_an_example() -> None:
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
    # Click itself reads the words: an option that does not exist, or a value of the wrong kind, fails here.
    assert TREE[path].make_context(path, words).command is TREE[path]


def test_the_reference_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == reference(), "python -m zerotrain.cli.document > docs/cli.md"


SHARED = {
    ExitCode.BAD_CONFIG: "INVALID",
    ExitCode.CHECKPOINT_UNUSABLE: None,
    ExitCode.DOES_NOT_FIT: None,
    ExitCode.STORAGE_FAILED: None,
}
"""Codes with the same meaning for a worker and for a command -> name in CommandExit, where it differs."""


def test_no_exit_code_means_two_things() -> None:
    ours = {int(code) for code in CommandExit} - {int(code) for code in SHARED}
    assert ours.isdisjoint({row.code for row in EXIT_CODES})
    assert {row.code for row in COMMAND_EXITS} == {int(code) for code in CommandExit}
    for code, name in SHARED.items():
        assert CommandExit[name or code.name] == int(code)


CODE_NAMES = {
    **{f"CommandExit.{code.name}": int(code) for code in CommandExit},
    **{f"ExitCode.{code.name}": int(code) for code in ExitCode},
}


def codes_in(source: str) -> set[int]:
    """Return every exit code that a module names or writes as a number where a command ends."""
    found = set[int]()
    tree = ast.parse(source)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, int)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in CODE_NAMES:
            found.add(CODE_NAMES[ast.unparse(node)])
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("typer.Exit", "sys.exit", "CliError"):
            given = [*node.args, *(item.value for item in node.keywords if item.arg == "code")]
            for value in given:
                if isinstance(value, ast.Constant) and isinstance(value.value, int):
                    found.add(value.value)
                if isinstance(value, ast.Name) and value.id in constants:
                    found.add(constants[value.id])
    return found


COMMANDS = Path(zerotrain_cli.__file__).parent
OF_A_JOB = ("local", "run.py", "report")
"""Modules that use the codes of workers: `run` ends with its job's code, a report shows them."""


def test_the_table_has_every_code_that_a_command_ends_with() -> None:
    files = [
        path
        for path in [*COMMANDS.rglob("*.py"), Path(errors_of_client.__file__), Path(errors_of_saves.__file__)]
        if path.relative_to(path.parents[1]).parts[0] not in OF_A_JOB and path.name not in OF_A_JOB
    ]
    used = {code: path.name for path in files for code in codes_in(path.read_text())}
    rows = {row.code for row in COMMAND_EXITS}
    assert {code: name for code, name in used.items() if code not in rows | {0}} == {}
    # Every row is used, except for Ctrl-C and wrong options, which Python and click handle.
    assert rows - set(used) - {int(CommandExit.INTERRUPTED), int(CommandExit.USAGE)} == set()


def test_the_search_for_codes_sees_them() -> None:
    source = "A = 9\ntyper.Exit(7)\nCliError('x', code=int(ExitCode.BAD_DATA))\ntyper.Exit(A)\nsys.exit(8)"
    assert codes_in(source) == {7, 8, 9, int(ExitCode.BAD_DATA)}


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
