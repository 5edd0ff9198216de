"""`zerotrain explain exit-codes`: the contract's table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from zerotrain.contract.exit_codes import EXIT_CODES

EXAMPLE = "Example: zerotrain explain exit-codes"


def exit_codes() -> None:
    """Print what each exit code of a worker means and who pays for a retry."""
    console = Console()
    table = Table(box=None, pad_edge=False)
    for column in ("code", "name", "meaning", "retry", "what to do"):
        table.add_column(column, overflow="fold")
    for row in EXIT_CODES:
        table.add_row(str(row.code), row.name, row.meaning, row.retry.value, row.way_out)
    console.print(table)
