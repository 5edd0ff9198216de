"""The log of the script itself: what it writes by DeepSpeed's logger, or asks the engine to write.

DeepSpeed's logger prints from INFO on without any set-up, and scripts report their progress by it. So ours
does, too, to standard output, unless the program has configured `logging`, whose handlers then get the lines.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class _Fallback(logging.StreamHandler[TextIO]):
    """Prints where the program's own handlers would not see a line."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print the line, unless the root logger has handlers."""
        if not logging.getLogger().handlers:
            self.stream = sys.stdout  # a program may have replaced it
            super().emit(record)


def script_logger() -> logging.Logger:
    """Return the logger `zerotrain.script`, which prints as DeepSpeed's does."""
    logger = logging.getLogger("zerotrain.script")
    if not any(isinstance(each, _Fallback) for each in logger.handlers):
        logger.addHandler(_Fallback())
        logger.setLevel(logging.INFO)
    return logger
