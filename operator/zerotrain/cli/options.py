"""Parts shared by all commands about a cluster: options, connection, errors, completion of names.

A command is a function whose first parameter is a `Target`, decorated with `cluster_command`. The decorator
adds the options that choose the cluster to the command's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

import typer

from zerotrain.cli.errors import CliError
from zerotrain.client.command_exits import CommandExit
from zerotrain.client.errors import ClientError

if TYPE_CHECKING:
    from zerotrain.client import Client

P = ParamSpec("P")


class Format(StrEnum):
    """Format of printed objects."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


class Output(StrEnum):
    """Output format of commands that need no cluster."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class DryRun(StrEnum):
    """Extent of a dry run."""

    NONE = "none"
    CLIENT = "client"
    """The change is checked and printed locally; the cluster is at most read."""
    SERVER = "server"
    """The API server checks the change by all its rules and stores nothing."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Cluster and namespace of a command. `client` connects at its first use."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: Path | None = None

    @functools.cached_property
    def client(self) -> Client:
        from zerotrain.client import Client

        return Client.connect(self.kubeconfig, self.context, self.namespace)


def complete_jobs(context: typer.Context, incomplete: str) -> list[str]:
    """Return names of jobs for shell completion; empty if the cluster does not answer."""
    target = Target(**{name: context.params.get(name) for name in _TARGET_OPTIONS})
    try:
        return [job.name for job in target.client.list() if job.name.startswith(incomplete)]
    except (ClientError, OSError):
        return []


JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="Name of the job.", autocompletion=complete_jobs)
]
FormatOption = Annotated[
    Format, typer.Option("-o", "--output", help="Output format; json, yaml and name are for programs.")
]
OutputOption = Annotated[
    Output, typer.Option("-o", "--output", help="Output format; json and yaml are for programs.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="The JSON file of the ConfigMap that spec.configFrom names, if the job file does not contain "
        "that ConfigMap.",
    ),
]
DryRunOption = Annotated[
    DryRun,
    typer.Option(
        "--dry-run",
        help="client: check the change here, send nothing; server: the API server checks it, stores nothing.",
    ),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option("-n", "--namespace", help="Namespace of the job; that of the context unless given."),
]
ContextOption = Annotated[
    str | None, typer.Option("--context", help="Context of the kubeconfig; the current one unless given.")
]
KubeconfigOption = Annotated[
    Path | None,
    typer.Option("--kubeconfig", help="Path of the kubeconfig; $KUBECONFIG or ~/.kube/config unless given."),
]
_TARGET_OPTIONS = {
    "namespace": NamespaceOption,
    "context": ContextOption,
    "kubeconfig": KubeconfigOption,
}


def cluster_command(function: Callable[Concatenate[Target, P], None]) -> Callable[..., None]:
    """Return the function as a command: with options for its Target, and with client errors as CliError."""
    signature = inspect.signature(function, eval_str=True)
    own = list(signature.parameters.values())[1:]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _TARGET_OPTIONS.items()
    ]

    @functools.wraps(function)
    def command(**options: Any) -> None:
        target = Target(**{name: options.pop(name) for name in _TARGET_OPTIONS})
        try:
            function(target, **options)  # type: ignore[call-arg]
        except ClientError as error:
            raise as_cli_error(error) from error

    parameters = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own]
    command.__signature__ = signature.replace(parameters=[*parameters, *added])  # type: ignore[attr-defined]
    command.__annotations__ = {item.name: item.annotation for item in [*parameters, *added]}
    del command.__dict__["__wrapped__"]
    return command


def as_cli_error(error: ClientError) -> CliError:
    """Return the CliError of a client error, with its code of COMMAND_EXITS and its next step."""
    return CliError(str(error), code=int(error.exit_code), next_step=error.next_step)


def usage_error(message: str, next_step: str | None = None) -> CliError:
    """Return the error for options that cannot be combined."""
    return CliError(message, code=int(CommandExit.USAGE), next_step=next_step)
