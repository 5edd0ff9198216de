"""Generator of docs/cli.md from the commands: `python -m zerotrain.cli.document > docs/cli.md`.

Typer vendors its own private click, so commands are recognised by their attributes, not by their types.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import typer.main

from zerotrain.client.command_exits import COMMAND_EXITS

Command: TypeAlias = Any
Parameter: TypeAlias = Any

_KINDS = {int: "N", float: "NUMBER", Path: "PATH"}

_HEAD = """\
# Command line

Generated from the commands: `python -m zerotrain.cli.document > docs/cli.md`.

`kubectl zerotrain ...` is the same program as `zerotrain ...`. Commands about a cluster connect as kubectl
does: by `KUBECONFIG` (else `~/.kube/config`), its current context and namespace, unless `--kubeconfig`,
`--context` and `-n` select others; in a pod, the pod's service account.

Results go to standard output, everything else to standard error. Progress is shown only on a terminal;
`NO_COLOR` switches colours off. Texts of a cluster or a training program are printed without control
characters. Completion of commands, options and names of jobs: `zerotrain --install-completion`.

What `-o json` and `-o yaml` print is for programs: from version to version keys are added, never renamed or
removed, and none changes its type or its unit. Objects of the cluster are those of the API server.
"""

_EXITS = """\
## Exit codes

`zerotrain run` ends with its job's code (`zerotrain explain exit-codes`). Every other command ends with 0, or
with one of these; they do not change from version to version. An error names the cause, and after `next:` the
remedy.
"""


def reference() -> str:
    """Return the whole page."""
    from zerotrain.cli.main import app

    commands = list(leaves(typer.main.get_command(app)))
    index = ["| Command | |", "|---|---|"]
    index += [
        f"| [`zerotrain {path}`](#{_anchor(path)}) | {_first_line(command)} |" for path, command in commands
    ]
    parts = ["\n".join([_HEAD, *index]), _exit_table()]
    parts += ["\n".join(_section(path, command)) for path, command in commands]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def leaves(group: Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Command]]:
    """Yield every visible command that is not a group, with its words after `zerotrain`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, (*path, name))
        if not hasattr(command, "commands") and not command.hidden:
            yield " ".join((*path, name)), command


def _exit_table() -> str:
    rows = [f"| {row.code} | {row.meaning} | {row.way_out} |" for row in COMMAND_EXITS]
    return "\n".join([_EXITS, "| Code | Meaning | What to do |", "|---|---|---|", *rows])


def _section(path: str, command: Command) -> Iterator[str]:
    arguments = [item for item in command.params if item.param_type_name == "argument"]
    options = [item for item in command.params if item.param_type_name == "option" and not item.hidden]
    words = [*(_metavar(item) for item in arguments), "[OPTIONS]"]
    if not command.context_settings.get("allow_interspersed_args", True):
        words = [words[-1], *words[:-1]]
    usage = " ".join([f"zerotrain {path}", *words])
    yield f"## zerotrain {path}"
    yield ""
    yield "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    yield ""
    yield "```console"
    yield f"$ {usage}"
    yield f"$ {' '.join((command.epilog or '').removeprefix('Example: ').split())}"
    yield "```"
    rows = [*(_argument_row(item) for item in arguments), *(_option_row(item) for item in options)]
    if rows:
        yield ""
        yield "| | | Default |"
        yield "|---|---|---|"
        yield from rows


def _argument_row(argument: Parameter) -> str:
    return f"| `{_metavar(argument)}` | {_cell(getattr(argument, 'help', None) or '')} | |"


def _option_row(option: Parameter) -> str:
    names = ", ".join(f"`{name}`" for name in sorted(option.opts, key=len))
    if option.secondary_opts:
        names += " / " + ", ".join(f"`{name}`" for name in option.secondary_opts)
    kind = "" if option.is_flag else f" {_cell(_kind(option))}"
    return f"| {names}{kind} | {_cell(option.help or '')} | {_cell(_default(option))} |"


def _kind(option: Parameter) -> str:
    """Return the placeholder for an option's value."""
    annotation = option.type_descriptor.annotation
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "|".join(str(item.value) for item in annotation)
    return str(option.metavar or _KINDS.get(annotation, "TEXT"))


def _default(option: Parameter) -> str:
    value = option.default
    if value is None or value is False or callable(value) or repr(value).startswith("Sentinel"):
        return ""
    return str(getattr(value, "value", value))


def _metavar(argument: Parameter) -> str:
    name = argument.metavar or (argument.name or "").upper().replace("_", "-")
    if argument.required or name.startswith("["):
        return name
    return f"[{name}]"


def _first_line(command: Command) -> str:
    return _cell((command.help or "").split("\n\n")[0])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _anchor(path: str) -> str:
    return f"zerotrain-{path.replace(' ', '-')}"


if __name__ == "__main__":
    print(reference(), end="")
