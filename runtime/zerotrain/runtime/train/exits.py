"""Exit code of a rank for every way in which a run can end."""

from __future__ import annotations

import errno
from pathlib import Path

from zerotrain.contract.config import ConfigError
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.train_spec import TrainSpecError
from zerotrain.contract.worker_environment import LaunchError
from zerotrain.runtime.zero.layout import LayoutError

APPLICATION_FAILURE = 1
"""Exit code of a failure without a code of its own: retried within the job's budget."""


class Diverged(Exception):
    """Raised when the loss stays NaN or infinite, or updates are skipped for the gradient several times in a
    row."""

    exit_code: ExitCode = ExitCode.DIVERGED


class StoppedWithoutCheckpoint(Exception):
    """Raised when all ranks stopped on request, but the policy, or a loss that was not finite, forbids a
    save."""

    exit_code: ExitCode = ExitCode.TERMINATED


def exit_code_of(error: BaseException, *, has_stepped: bool = False) -> int:
    """Return the exit code for an exception that ends the run; errors of this project carry theirs as
    `exit_code`.

    A process that had enough memory for a step (`has_stepped`) may have enough again: it failed because of
    fragmentation, a longer sample or another process on its host. The operator recognises such an end by the
    exception and tries again within a budget.
    """
    code = getattr(error, "exit_code", None)
    if isinstance(code, ExitCode):
        return int(code)
    if isinstance(error, LaunchError):
        return int(ExitCode.BAD_LAUNCH)
    if isinstance(error, ConfigError | TrainSpecError):
        return int(ExitCode.BAD_CONFIG)
    if isinstance(error, LayoutError):
        return int(ExitCode.BAD_MODEL)
    if _is_out_of_memory(error) and not has_stepped:
        return int(ExitCode.DOES_NOT_FIT)
    return APPLICATION_FAILURE


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch has no exception type for out-of-memory on the host.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def is_the_users(error: BaseException, *, has_stepped: bool = False) -> bool:
    """Return whether the message alone tells the user what to edit, so that a traceback would only hide
    it."""
    return exit_code_of(error, has_stepped=has_stepped) != APPLICATION_FAILURE


def read_text(path: Path, what: str) -> str:
    """Return the contents of a file that the operator or `zerotrain run` wrote. Raises LaunchError."""
    try:
        return path.read_text()
    except OSError as error:
        raise LaunchError(
            f"{what} {path} cannot be read: {error.strerror}; the operator and `zerotrain run` write it"
        ) from error
