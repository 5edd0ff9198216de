"""Runner of the console blocks of a document, exactly as a reader would type them.

A block that is executed has `<!-- run: NAME -->` on the line before it. In it, `$ ` begins a command (a line
that ends with a backslash goes on), and what follows is its output. A command must succeed. Output is
compared where some is given: `...` stands for anything, also for any number of lines, and runs of spaces are
one space.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.test_repo_shape import ROOT

_BLOCK = re.compile(
    r"<!-- run: (?P<name>[a-z-]+) -->\n```console\n(?P<body>.*?)^```$", flags=re.DOTALL | re.MULTILINE
)


class ConsoleError(AssertionError):
    """A command failed, or printed something else than the document shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command of a block: the text after `$ `, and its output."""

    text: str
    expected: str
    place: str
    """Place of the command as "document:line"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One marked block."""

    name: str
    commands: tuple[Command, ...]


def blocks(document: Path) -> dict[str, Block]:
    """Return the marked blocks of a document, by name."""
    text = document.read_text(encoding="utf-8")
    found: dict[str, Block] = {}
    for match in _BLOCK.finditer(text):
        first_line = text.count("\n", 0, match.start("body")) + 1
        if match["name"] in found:
            raise ConsoleError(f"{document.name}: two blocks are called {match['name']}")
        commands = tuple(_commands(match["body"], f"{document.name}", first_line))
        found[match["name"]] = Block(name=match["name"], commands=commands)
    marks = len(re.findall(r"^<!-- run: ", text, flags=re.MULTILINE))
    if marks != len(found):
        raise ConsoleError(f"{document.name}: {marks} marks, but {len(found)} console blocks right below one")
    return found


def _commands(body: str, name: str, first_line: int) -> list[Command]:
    found: list[tuple[str, list[str], str]] = []
    goes_on = False
    for number, line in enumerate(body.splitlines(), first_line):
        if goes_on:
            text, output, place = found[-1]
            found[-1] = (f"{text}\n{line}", output, place)
        elif line.startswith("$ "):
            found.append((line[2:], [], f"{name}:{number}"))
        elif found:
            found[-1][1].append(line)
        else:
            raise ConsoleError(f"{name}:{number}: a block begins with a command ($ ...)")
        goes_on = line.endswith("\\") and not found[-1][1]
    return [Command(text=text, expected="\n".join(output), place=place) for text, output, place in found]


@dataclass(kw_only=True, slots=True)
class Shell:
    """Environment in which the commands run. `export` and `cd` do not carry over: each command has its own
    shell.
    """

    environ: Mapping[str, str]
    """Variables added to this process's environment; PATH is put in front of its own."""
    folder: Path = ROOT
    timeout_s: float = 660.0
    outputs: list[str] = field(default_factory=list)
    """All output so far, for the message of a failure."""

    def run(self, block: Block) -> None:
        """Run all commands of the block, in order."""
        for command in block.commands:
            self.command(command)

    def command(self, command: Command) -> str:
        environ = {**os.environ, **self.environ}
        if "PATH" in self.environ:
            environ["PATH"] = f"{self.environ['PATH']}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command.text],
            cwd=self.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self.timeout_s,
            check=False,
        )
        self.outputs.append(f"$ {command.text}\n{done.stdout}")
        if done.returncode != 0:
            raise ConsoleError(f"{command.place}: exit {done.returncode}\n{''.join(self.outputs[-3:])}")
        if command.expected and not matches(command.expected, done.stdout):
            raise ConsoleError(
                f"{command.place}: the document has\n{command.expected}\n\nthe output is\n{self.outputs[-1]}"
            )
        return done.stdout


def matches(expected: str, printed: str) -> bool:
    """Return whether `printed` is what the document shows; a line of `...` alone may also be no line."""
    parts = re.split(r"(^\.\.\.\n|\n\.\.\.\Z| ?\.\.\. ?)", _one_space(expected).strip(), flags=re.MULTILINE)
    pattern = "".join(_WILD.get(part) or (".*" if "..." in part else re.escape(part)) for part in parts)
    return re.fullmatch(pattern, _one_space(printed).strip(), flags=re.DOTALL) is not None


_WILD = {"...\n": r"(?:.*\n)?", "\n...": r"(?:\n.*)?"}


def _one_space(text: str) -> str:
    """Return the text with runs of blanks and of line ends as one each."""
    return re.sub(r"[ \t]+", " ", re.sub(r"[ \t]*\n\s*", "\n", text))
