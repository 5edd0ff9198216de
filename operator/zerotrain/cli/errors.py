"""How every command fails: what went wrong, which code, what to type next."""

from __future__ import annotations

from rich.console import Console

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.text import printable_lines


class CliError(Exception):
    """A command cannot do what it was asked to."""

    def __init__(self, message: str, *, next_step: str | None, code: int = int(ExitCode.BAD_CONFIG)) -> None:
        """`message` may have several lines; `next_step` is a command to type or a thing to correct.

        It is None for errors of others alone that bring none along.
        """
        super().__init__(message)
        self.code = code
        self.next_step = next_step


def show(error: CliError) -> None:
    """On standard error, so that a pipe's reader gets results alone. A message may quote what a cluster, a
    registry or a training program said: nothing of it reaches the terminal as a command."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"error ({error.code}):", style="bold red", end=" ")
    console.print("\n".join(printable_lines(str(error))), markup=False)
    if error.next_step is not None:
        console.print("next:", style="bold", end=" ")
        console.print("\n".join(printable_lines(error.next_step)), markup=False)
