"""Errors of training data. They end every rank with exit code BAD_DATA: a retry would find the same files."""

from __future__ import annotations

from zerotrain.contract.exit_codes import ExitCode, may_pass


class DataError(Exception):
    """The data is missing, unreadable, empty, too short or of the wrong kind."""

    exit_code: ExitCode = ExitCode.BAD_DATA

    @classmethod
    def unreadable(cls, what: str, error: OSError) -> DataError:
        """Return the error for a file that the operating system cannot read; with STORAGE_FAILED where the
        fault may pass."""
        found = cls(f"{what} cannot be read: {error.strerror}")
        if may_pass(error.errno):
            found.exit_code = ExitCode.STORAGE_FAILED
        return found
