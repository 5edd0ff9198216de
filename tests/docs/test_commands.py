"""Every `zerotrain` command in the documents exists, with every option it is shown with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.commands import zerotrain
from tests.test_repo_shape import ROOT, tracked
from zerotrain.cli.errors import CliError
from zerotrain.cli.explain.lookup import explain_word
from zerotrain.cli.main import app
from zerotrain.client.command_exits import CommandExit

GROUP: Any = typer.main.get_command(app)
# typer brings its own copy of click, so click's classes do not match here.
_FENCE = re.compile(r"^```(?P<kind>\w*)\n(?P<body>.*?)^```", flags=re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`((?:kubectl )?zerotrain [^`]+)`")
NO_COMMANDS = {"zerotrain spill store 1"}
"""Inline code that only looks like a command: a text in the spill's associated data."""

_PROSE = re.compile(r"^(?:kubectl )?zerotrain ")


def shown(text: str) -> Iterator[str]:
    """Yield the commands of console blocks and of inline code."""
    yield from typed(text)
    for match in _INLINE.finditer(_FENCE.sub("", text)):
        yield match[1].replace("\n", " ")


def typed(text: str) -> Iterator[str]:
    """Yield the commands of console blocks alone: complete ones, to be typed as they stand."""
    for match in _FENCE.finditer(text):
        if match["kind"] in ("console", "", "sh", "bash"):
            lines = match["body"].replace("\\\n", " ").splitlines()
            commands = (re.sub(r"^\$ |^\.venv/bin/", "", line.strip()) for line in lines)
            yield from (re.sub(r"^\.venv/bin/", "", line) for line in commands if _is_command(line))


def _is_command(line: str) -> bool:
    return _PROSE.match(re.sub(r"^\.venv/bin/", "", line)) is not None


def problem(command: str) -> str | None:
    """Return the problem of a command; None when there is none."""
    if command in NO_COMMANDS:
        return None
    for alternative in _alternatives(command):
        found = _walk(alternative)
        if found is not None:
            return f"{command!r}: {found}"
    return None


def _alternatives(command: str) -> list[list[str]]:
    """Return the commands that a notation such as `checkpoint ls|verify FOLDER` stands for, up to a pipe, a
    comment or &&.
    """
    plain = re.split(r"\s(?:\||#|&&|>|;)\s?|\.\.\.", command.removeprefix("kubectl "))[0]
    words = shlex.split(plain.replace("'", "").replace('"', ""))[1:]
    found: list[list[str]] = [[]]
    for word in words:
        choices = word.split("|") if re.fullmatch(r"[a-z-]+(\|[a-z-]+)+", word) else [word]
        found = [[*start, choice] for start in found for choice in choices]
    return found


def _walk(words: list[str]) -> str | None:
    here = GROUP
    context = here.context_class(here)
    for word in words:
        if word.startswith("-") and word.strip("-") and not re.fullmatch(r"-\d+", word):
            option = word.split("=")[0]
            known = {name for item in here.params for name in (*item.opts, *item.secondary_opts)}
            if option not in known | {"--help", "-h"}:
                return f"{here.name or 'zerotrain'} has no option {option}"
        elif hasattr(here, "get_command"):
            child = here.get_command(context, word)
            if child is None and here.name == "explain":
                return _unexplained(word)
            if child is None and not re.fullmatch(r"[A-Z][A-Z_-]*|<.*>|\[.*", word):
                return f"{here.name or 'zerotrain'} has no command {word}"
            if child is None:
                return None
            here = child
        elif not here.context_settings.get("allow_interspersed_args", True) and not word.isdecimal():
            return None  # a script: its own options follow
    return None


def unparsed(command: str) -> str | None:
    """Return the parser's error for a complete command: a missing or mistyped argument; None without one."""
    for words in _alternatives(command):
        here: Any = GROUP
        path: list[str] = []
        while words and hasattr(here, "get_command"):
            child = here.get_command(here.context_class(here), words[0])
            if child is None:
                break
            path, here, words = [*path, words[0]], child, words[1:]
        if hasattr(here, "get_command") or "--help" in words or any("[" in word for word in words):
            continue  # a general form; `problem` has checked its words
        found = _refused(here, " ".join(path), words) or _lonely(" ".join(path), words)
        if found is not None:
            return f"{command!r}: {found}"
    return None


def _refused(command: Any, path: str, words: list[str]) -> str | None:
    """Return the parser's error, unless a number in the place of a placeholder avoids it."""
    try:
        command.make_context(path, list(words))
    except typer.Exit:
        return None
    except Exception as error:
        # typer's own copy of click must not be imported; its errors have a message for users.
        if not hasattr(error, "format_message"):
            raise
        if "does not exist" in error.format_message():
            return None  # the reader's file
        numbers = ["1" if re.fullmatch(r"[A-Z]+", word) else word for word in words]
        return str(error.format_message()) if numbers == words else _refused(command, path, numbers)
    return None


NEEDS = {("doctor", "--pod"): "--image"}
"""Command and option -> the further option that it needs."""


def _lonely(path: str, words: list[str]) -> str | None:
    for (command, option), needed in NEEDS.items():
        if command == path and option in words and needed not in words:
            return f"{option} needs {needed}"
    return None


def _unexplained(word: str) -> str | None:
    """Return the error of `explain` for a word that it does not know; None for others."""
    if re.fullmatch(r"[A-Z_]+|\[.*", word):
        return None
    try:
        explain_word(word)
    except CliError as error:
        return str(error)
    return None


def documents() -> list[Path]:
    return [path for path in tracked(".md") if "adr" not in path.parts and path.name != "CHANGELOG.md"]


@pytest.mark.ranks
def test_every_command_in_the_documents_exists() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {wrong}"
        for path in documents()
        for command in shown(path.read_text(encoding="utf-8"))
        if (wrong := problem(command)) is not None
    ]
    assert found == []


@pytest.mark.ranks
def test_every_command_to_type_is_complete() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {wrong}"
        for path in documents()
        for command in typed(path.read_text(encoding="utf-8"))
        if (wrong := unparsed(command)) is not None
    ]
    assert found == []


@pytest.mark.unit
@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("zerotrain scale gpt", "--workers"),
        ("zerotrain describe", "JOB"),
        ("zerotrain logs gpt --tail many", "many"),
        ("zerotrain doctor --pod --node NODE", "--pod needs --image"),
        ("zerotrain scale gpt --workers N --nonsense", "--nonsense"),
    ],
)
def test_the_check_sees_what_is_missing(command: str, part: str) -> None:
    assert part in (unparsed(command) or "")


@pytest.mark.unit
@pytest.mark.parametrize(
    "command", ["zerotrain logs JOB --tail N", "zerotrain get -A | head", "zerotrain config [OPTIONS]"]
)
def test_placeholders_and_general_forms_are_complete(command: str) -> None:
    assert unparsed(command) is None


@pytest.mark.unit
def test_what_needs_another_option_reports_it_itself() -> None:
    """The commands themselves require what NEEDS says."""
    for (command, option), needed in NEEDS.items():
        done = zerotrain(command, option)
        assert done.code == CommandExit.INVALID
        assert needed in done.err


@pytest.mark.ranks
def test_the_documents_show_commands() -> None:
    commands = [command for path in documents() for command in shown(path.read_text(encoding="utf-8"))]
    assert len(commands) > 30


@pytest.mark.unit
@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("zerotrain plann job.yaml", "no command plann"),
        ("zerotrain plan job.yaml --gpus 3", "no option --gpus"),
        ("zerotrain checkpoint ls|verfy FOLDER", "no command verfy"),
        ("kubectl zerotrain versoin", "no command versoin"),
        ("zerotrain explain ZeroTrainNoSuchAlert", "ZeroTrainNoSuchAlert"),
    ],
)
def test_the_check_sees_a_mistake(command: str, part: str) -> None:
    assert part in (problem(command) or "")


@pytest.mark.unit
def test_alternatives_pipes_and_placeholders_are_understood() -> None:
    for command in (
        "zerotrain checkpoint ls|verify FOLDER",
        "zerotrain plan job.yaml -o json | jq",
        "zerotrain VERB",
    ):
        assert problem(command) is None
