"""`zerotrain config show`: every key of a configuration with its final value, origin and effect."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from zerotrain.cli.errors import CliError
from zerotrain.contract.config import ConfigError, EngineConfig, KeyReport, load, resolve
from zerotrain.contract.exit_codes import ExitCode

EXAMPLE = "Example: zerotrain config show ds_config.json --world-size 8"


def show_config(
    file: Annotated[Path, typer.Argument(help="A job file (YAML), or a DeepSpeed-style JSON file.")],
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks to resolve for; a job file's own unless given, else 1.")
    ] = None,
    all_keys: Annotated[bool, typer.Option("--all", help="Also keys that are at their default.")] = False,
) -> None:
    """Print each key with its final value, where the value comes from, and what it does here."""
    try:
        config = (
            of_job(file, world_size) if is_yaml(file) else resolve(load(file), world_size=world_size or 1)
        )
    except ConfigError as error:
        raise CliError(str(error), next_step=f"correct {file} and run the command again") from error
    except OSError as error:
        raise CliError(f"{file}: {error.strerror}", code=int(ExitCode.BAD_CONFIG)) from error
    _print(Console(), [row for row in config.report if all_keys or row.origin != "default"])
    for notice in config.notices:
        typer.echo(f"note: {notice.path}: {notice.message}")
    for item in config.unsupported:
        typer.echo(f"not run: {item.path}: {item.reason} {item.way_out}")


def is_yaml(file: Path) -> bool:
    """Whether it is read as a job file."""
    return file.suffix in {".yaml", ".yml"}


def of_job(file: Path, world_size: int | None) -> EngineConfig:
    """The configuration inside a job file. Raises CliError, ConfigError."""
    # Imported late: the models of the API take a second that no other command needs.
    from zerotrain.client.jobfile import JobFileError, load_job
    from zerotrain.operator.api.admission import engine_config

    try:
        spec = load_job(file).job.spec
    except JobFileError as error:
        raise CliError(str(error), next_step=f"correct {file} and run the command again") from error
    config = engine_config(spec, world_size=world_size)
    if config is None:
        raise CliError(f"{file}: the configuration is in a ConfigMap (spec.configFrom); show its JSON file")
    return config


def _print(console: Console, rows: Iterable[KeyReport]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("key", "value", "origin", "status", "effect"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row.path, json.dumps(row.value, default=str), row.origin, row.status, row.effect)
    console.print(table, markup=False)
