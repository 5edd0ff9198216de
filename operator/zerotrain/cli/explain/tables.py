"""`zerotrain explain exit-codes|memory`: the contract's exit codes; the tables of the ZeRO papers."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from zerotrain.cli.errors import CliError
from zerotrain.cli.options import Output, OutputOption
from zerotrain.cli.output import show, show_record, show_table
from zerotrain.cli.plan import parse_count
from zerotrain.client.command_exits import COMMAND_EXITS
from zerotrain.contract.exit_codes import EXIT_CODES

EXAMPLE = "Example: zerotrain explain exit-codes"
MEMORY_EXAMPLE = "Example: zerotrain explain memory 7B --ranks 8"
GB = 10**9


def exit_codes(output: OutputOption = Output.TABLE) -> None:
    """Print the exit codes of workers, with the budget that a retry is charged to; then those of commands."""
    workers = [(row.code, row.name, row.meaning, row.retry.value, row.way_out) for row in EXIT_CODES]
    commands = [(row.code, row.name, row.meaning, row.way_out) for row in COMMAND_EXITS]
    if output is not Output.TABLE:
        names = ("code", "name", "meaning", "retry", "way_out")
        record = {
            "workers": [dict(zip(names, row, strict=True)) for row in workers],
            "commands": [dict(zip((*names[:3], names[4]), row, strict=True)) for row in commands],
        }
        show_record(record, output)
        return
    show_table(("code", "name", "meaning", "retry", "what to do"), (tuple(map(str, row)) for row in workers))
    show("")
    show_table(("code", "of a command", "meaning", "what to do"), (tuple(map(str, row)) for row in commands))


def memory(
    parameters: Annotated[
        str, typer.Argument(help="Number of parameters of the model, such as 7B or 7.5e9.")
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 8,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the size of weights, gradients and Adam's states on one rank at every stage, in GB of 10^9 bytes.

    The table has several conventions side by side, because published tables differ in them. It leaves out
    activations, buffers and padding; `zerotrain plan` includes them.
    """
    from zerotrain.cli.plan_view import wide_console
    from zerotrain.contract.planner import CONVENTIONS, count_text, model_state_bytes

    try:
        count = parse_count(parameters)
    except ValueError as error:
        raise CliError(
            f"parameters: {error}", next_step="write a number such as 7B, 350M or 7.5e9"
        ) from error
    rows = [
        (
            convention,
            [model_state_bytes(count, ranks=ranks, stage=at, convention=convention) for at in range(4)],
        )
        for convention in CONVENTIONS
    ]
    if output is not Output.TABLE:
        states = [
            {"formula": item.formula, "name": item.name, "bytes_by_stage": sizes} for item, sizes in rows
        ]
        show_record({"parameters": count, "ranks": ranks, "conventions": states}, output)
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("bytes per parameter", no_wrap=True)
    table.add_column("", no_wrap=True)
    for stage in range(4):
        table.add_column(f"stage {stage}", justify="right", no_wrap=True)
    for convention, sizes in rows:
        table.add_row(convention.formula, convention.name, *(f"{size / GB:.6g}" for size in sizes))
    console = wide_console()
    console.print(f"{count_text(count)} parameters on {ranks} ranks, GB on each")
    console.print(table)
