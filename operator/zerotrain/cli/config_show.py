"""`zerotrain config show`: every key of a configuration with its final value, origin and effect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerotrain.cli.errors import CliError
from zerotrain.cli.options import ConfigOption, Output, OutputOption, usage_error
from zerotrain.cli.output import show, show_record, show_table

if TYPE_CHECKING:
    from zerotrain.contract.config import EngineConfig, KeyReport

EXAMPLE = "Example: zerotrain config show ds_config.json --world-size 8"


def show_config(
    file: Annotated[Path, typer.Argument(help="A job file (YAML), or a DeepSpeed-style JSON file.")],
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks to resolve for; a job file's own unless given, else 1.")
    ] = None,
    config: ConfigOption = None,
    all_keys: Annotated[bool, typer.Option("--all", help="Also keys that are at their default.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print each key with its final value, where the value comes from, and what it does here."""
    from zerotrain.contract.config import ConfigError

    try:
        found = config_of(file, world_size, config)
    except ConfigError as error:
        raise CliError(str(error), next_step=f"correct {file} and run the command again") from error
    except OSError as error:
        raise CliError(
            f"{file}: {error.strerror}", next_step="give a job file (YAML) or a configuration (JSON)"
        ) from error
    rows = [row for row in found.report if all_keys or row.origin != "default"]
    if output is not Output.TABLE:
        show_record(_record(found, rows), output)
        return
    show_table(
        ("key", "value", "origin", "status", "effect"),
        ((row.path, json.dumps(row.value, default=str), row.origin, row.status, row.effect) for row in rows),
    )
    for notice in found.notices:
        show(f"note: {notice.path}: {notice.message}")
    for item in found.unsupported:
        show(f"not run: {item.path}: {item.reason} {item.way_out}")


def config_of(file: Path, world_size: int | None, config: Path | None = None) -> EngineConfig:
    """Return the configuration of a job file (YAML), or of a DeepSpeed-style JSON file.

    `config` stands in for the ConfigMap of a job file. Raises CliError, ConfigError or OSError.
    """
    # Imported late, because importing the schema takes longer than printing `--help`.
    from zerotrain.contract.config import load, resolve

    if file.suffix in {".yaml", ".yml"}:
        return _of_job(file, world_size, config)
    if config is not None:
        raise usage_error(
            f"{file} is a configuration itself, and --config {config} another", "leave one of them out"
        )
    return resolve(load(file), world_size=world_size or 1)


def _of_job(file: Path, world_size: int | None, config: Path | None) -> EngineConfig:
    # Imported late: importing the API's models takes a second, which no other command needs to spend.
    from zerotrain.client.config_source import ConfigSourceError, inlined
    from zerotrain.client.jobfile import JobFileError, load_job
    from zerotrain.operator.api.admission import engine_config

    try:
        spec = inlined(load_job(file), config).job.spec
    except ConfigSourceError as error:
        raise CliError(str(error), next_step=error.next_step) from error
    except JobFileError as error:
        raise CliError(str(error), next_step=f"correct {file} and run the command again") from error
    found = engine_config(spec, world_size=world_size)
    assert found is not None  # `inlined` returns no job without a configuration
    return found


def _record(config: EngineConfig, rows: Sequence[KeyReport]) -> dict[str, Any]:
    return {
        "keys": [
            {
                "key": row.path,
                "value": row.value,
                "origin": row.origin,
                "status": row.status,
                "effect": row.effect,
            }
            for row in rows
        ],
        "notes": [{"key": item.path, "message": item.message} for item in config.notices],
        "not_run": [
            {"key": item.path, "reason": item.reason, "way_out": item.way_out} for item in config.unsupported
        ],
    }
