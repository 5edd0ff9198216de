"""The error of a command: what went wrong, its exit code, and what to type next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.text import printable_lines


class CliError(Exception):
    """A command cannot do what the user asked for."""

    def __init__(self, message: str, *, next_step: str | None, code: int = int(ExitCode.BAD_CONFIG)) -> None:
        """Create the error.

        `message` may have several lines. `next_step` is a command to type or a thing to correct; it is None
        only for an error of another component that names no next step.
        """
        super().__init__(message)
        self.code = code
        self.next_step = next_step


@contextmanager
def job_file_errors(file: Path) -> Iterator[None]:
    """Replace the errors of a job file, and of a configuration beside it, by a CliError."""
    # Imported late: importing the API's models takes a second, which no other command needs to spend.
    from zerotrain.client.config_source import ConfigSourceError
    from zerotrain.client.jobfile import JobFileError

    try:
        yield
    except ConfigSourceError as error:
        raise CliError(str(error), next_step=error.next_step) from error
    except JobFileError as error:
        raise CliError(str(error), next_step=f"correct {file} and run the command again") from error


def show(error: CliError) -> None:
    """Print an error on standard error, so that a pipe receives only results.

    A message may quote a cluster, a registry or a training program. Its control characters are removed, so
    that the terminal does not interpret them.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"error ({error.code}):", style="bold red", end=" ")
    console.print("\n".join(printable_lines(str(error))), markup=False)
    if error.next_step is not None:
        console.print("next:", style="bold", end=" ")
        console.print("\n".join(printable_lines(error.next_step)), markup=False)
