"""Errors of a file or folder of weights."""

from __future__ import annotations

from zerotrain.contract.exit_codes import ExitCode


class WeightsError(ValueError):
    """Raised when the files cannot be read, or do not fit the model. Nothing was loaded then."""

    exit_code: ExitCode = ExitCode.BAD_MODEL
