"""What is wrong with training data; ends every rank with exit BAD_DATA: a retry finds the same files."""

from __future__ import annotations

from zerotrain.contract.exit_codes import ExitCode


class DataError(Exception):
    """The data is missing, unreadable, empty, too short or of the wrong kind."""

    exit_code: ExitCode = ExitCode.BAD_DATA
