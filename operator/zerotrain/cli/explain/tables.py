"""`zerotrain explain exit-codes|memory`: the contract's table; the tables of the ZeRO papers."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from zerotrain.cli.errors import CliError
from zerotrain.cli.plan import parse_count
from zerotrain.client.exit_codes import COMMAND_EXITS
from zerotrain.contract.exit_codes import EXIT_CODES

EXAMPLE = "Example: zerotrain explain exit-codes"
MEMORY_EXAMPLE = "Example: zerotrain explain memory 7B --ranks 8"
GB = 10**9


def exit_codes() -> None:
    """Print what each exit code of a worker means and who pays for a retry; then those of commands."""
    console = Console()
    table = Table(box=None, pad_edge=False)
    for column in ("code", "name", "meaning", "retry", "what to do"):
        table.add_column(column, overflow="fold")
    for row in EXIT_CODES:
        table.add_row(str(row.code), row.name, row.meaning, row.retry.value, row.way_out)
    console.print(table)
    console.print()
    commands = Table(box=None, pad_edge=False)
    for column in ("code", "of a command", "meaning", "what to do"):
        commands.add_column(column, overflow="fold")
    for item in COMMAND_EXITS:
        commands.add_row(str(item.code), item.name, item.meaning, item.way_out)
    console.print(commands)


def memory(
    parameters: Annotated[str, typer.Argument(help="Of the model, such as 7B or 7.5e9.")],
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 8,
) -> None:
    """Print what weights, gradients and Adam's states take on one rank at every stage, in GB of 10^9 bytes.

    By several conventions side by side, as published tables differ in them. Activations, buffers and padding
    are in none of these figures; `zerotrain plan` has all of it.
    """
    from zerotrain.cli.plan_view import wide_console
    from zerotrain.contract.planner import CONVENTIONS, count_text, model_state_bytes

    try:
        count = parse_count(parameters)
    except ValueError as error:
        raise CliError(
            f"parameters: {error}", next_step="write a number such as 7B, 350M or 7.5e9"
        ) from error
    table = Table(box=None, pad_edge=False)
    table.add_column("bytes per parameter", no_wrap=True)
    table.add_column("", no_wrap=True)
    for stage in range(4):
        table.add_column(f"stage {stage}", justify="right", no_wrap=True)
    for convention in CONVENTIONS:
        sizes = [
            model_state_bytes(count, ranks=ranks, stage=stage, convention=convention) for stage in range(4)
        ]
        table.add_row(convention.formula, convention.name, *(f"{size / GB:.6g}" for size in sizes))
    console = wide_console()
    console.print(f"{count_text(count)} parameters on {ranks} ranks, GB on each")
    console.print(table)
