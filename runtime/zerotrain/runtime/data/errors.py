"""What is wrong with training data; ends every rank with exit BAD_DATA: a retry finds the same files."""

from __future__ import annotations

from zerotrain.contract.exit_codes import ExitCode, may_pass


class DataError(Exception):
    """The data is missing, unreadable, empty, too short or of the wrong kind."""

    exit_code: ExitCode = ExitCode.BAD_DATA

    @classmethod
    def unreadable(cls, what: str, error: OSError) -> DataError:
        """The error for a file that the system does not let read; not the user's where it may pass."""
        found = cls(f"{what} cannot be read: {error.strerror}")
        if may_pass(error.errno):
            found.exit_code = ExitCode.STORAGE_FAILED
        return found
