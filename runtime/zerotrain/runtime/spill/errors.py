"""Errors of the spill store, beside `seal.SpillIntegrityError`. The trainer exits with an error's
`exit_code`.

SpillError              the spill store cannot be used: broken off, closed, forked, misused
  SpillDoesNotFit       the limit or the disk is too small                      exit 67
  SpillIOError          the device or the file system refused a read or a write
"""

from __future__ import annotations

from zerotrain.contract.exit_codes import ExitCode


class SpillError(RuntimeError):
    """Error of a spill store that cannot be used any more, or was used wrongly."""


class SpillDoesNotFit(SpillError):
    """Error of a spill file that is larger than the spill store's limit or the free space; the text gives
    both."""

    exit_code: ExitCode = ExitCode.DOES_NOT_FIT


class SpillIOError(SpillError):
    """Error of a read or write. `errno` is the system's; `offset` is in bytes from the file's start."""

    def __init__(self, message: str, *, errno: int, offset: int, unit: str, rank: int) -> None:
        super().__init__(message)
        self.errno = errno
        self.offset = offset
        self.unit = unit
        self.rank = rank
