"""`zerotrain config check` and `config show`: what each key of a configuration does, and its final value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from zerotrain.cli.errors import CliError, job_file_errors
from zerotrain.cli.options import ConfigOption, Output, OutputOption, usage_error
from zerotrain.cli.output import show, show_record, show_table
from zerotrain.contract.exit_codes import ExitCode

if TYPE_CHECKING:
    from zerotrain.contract.config import EngineConfig, KeyReport


CHECK_EXAMPLE = "Example: zerotrain config check ds_config.json --world-size 8"
SHOW_EXAMPLE = "Example: zerotrain config show ds_config.json --world-size 8"

WorldSizeOption = Annotated[
    int | None, typer.Option(min=1, help="Ranks to resolve for; a job file's own unless given, else 1.")
]


class Outcome(StrEnum):
    """Outcome of a key."""

    RUN = "run"
    """The key does what it says."""
    EXPLAINED = "explained"
    """The key is accepted, but something else happens instead, or it has no meaning here."""
    REFUSED = "refused"
    """The job would not start with this key."""


STYLES = {Outcome.RUN: "green", Outcome.EXPLAINED: "yellow", Outcome.REFUSED: "bold red"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One key that the file sets."""

    key: str
    outcome: Outcome
    value: Any
    why: str


def check_config(
    file: Annotated[Path, typer.Argument(help="A DeepSpeed-style JSON file, or a job file (YAML).")],
    world_size: WorldSizeOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print for each key of the file whether it is run, explained (something else happens) or refused.

    The exit code is 0 if the configuration would run, and 64 if a key is refused because it is unknown, has a
    wrong value, or requests a feature that this version does not have.
    """
    from zerotrain.contract.config import ConfigError

    try:
        rows = rows_of(config_of(file, world_size, config))
    except ConfigError as error:
        # The reader stops at the first wrong key, so nothing is known about the others.
        why = f"{error.rule}. {error.way_out}"
        rows = [Row(key=error.path, outcome=Outcome.REFUSED, value=error.value, why=why)]
    except OSError as error:
        raise CliError(f"{file}: {error.strerror}", next_step="give a file that can be read") from error
    refused = [row for row in rows if row.outcome is Outcome.REFUSED]
    if output is not Output.TABLE:
        show_record([asdict(row) for row in rows], output)
    else:
        _print(rows, refused)
    if refused:
        raise typer.Exit(int(ExitCode.BAD_CONFIG))


def rows_of(config: EngineConfig) -> list[Row]:
    """Return a row for every key that the file sets, the refused ones first."""
    notices: dict[str, list[str]] = {}
    for notice in config.notices:
        notices.setdefault(notice.path, []).append(notice.message)
    rows = [
        Row(key=item.path, outcome=Outcome.REFUSED, value=None, why=f"{item.reason} {item.way_out}")
        for item in config.unsupported
    ]
    known = {row.key for row in rows}
    for entry in config.report:
        if entry.origin in ("default", "derived") or entry.path in known:
            continue
        messages = notices.pop(entry.path, None)
        rows.append(
            Row(
                key=entry.path,
                outcome=Outcome.RUN if messages is None else Outcome.EXPLAINED,
                value=entry.value,
                why=entry.effect if messages is None else " ".join(messages),
            )
        )
    # Notices about older names and whole blocks have paths of the user's file that are not those of a key.
    rows += [
        Row(key=path, outcome=Outcome.EXPLAINED, value=None, why=" ".join(texts))
        for path, texts in notices.items()
        if path not in known
    ]
    order = list(Outcome)
    return sorted(rows, key=lambda row: -order.index(row.outcome))


def _print(rows: Sequence[Row], refused: Sequence[Row]) -> None:
    console = Console()
    values = ["" if row.value is None else json.dumps(row.value, default=str) for row in rows]
    show_table(
        ("outcome", "key", "value", "why"),
        (
            (Text.styled(row.outcome, STYLES[row.outcome]), row.key, value, row.why)
            for row, value in zip(rows, values, strict=True)
        ),
        console,
    )
    if refused:
        console.print(
            f"{len(refused)} of {len(rows)} keys refused: the job would not start", style="bold red"
        )
    else:
        console.print(f"{len(rows)} keys, none refused: the configuration runs", style="bold green")


def show_config(
    file: Annotated[Path, typer.Argument(help="A job file (YAML), or a DeepSpeed-style JSON file.")],
    world_size: WorldSizeOption = None,
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
    from zerotrain.client.config_source import inlined
    from zerotrain.client.jobfile import load_job
    from zerotrain.operator.api.configuration import engine_config

    with job_file_errors(file):
        spec = inlined(load_job(file), config).job.spec
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
