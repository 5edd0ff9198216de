"""The log of the script itself: what it writes by DeepSpeed's logger, or asks the engine to write.

DeepSpeed's logger prints from INFO on without any set-up, and scripts report their progress by it. So ours
does, too, to standard output, unless the program has configured `logging`, whose handlers then get the lines.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

_PARENT = logging.getLogger("zerotrain")
_LOGGER = _PARENT.getChild("script")


class _Fallback(logging.StreamHandler[TextIO]):
    """Prints where the program's own handlers would not see a line."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print the line, unless handlers of the program get it."""
        if not (_LOGGER.propagate and _PARENT.hasHandlers()):
            self.stream = sys.stdout  # a program may have replaced it
            super().emit(record)


def script_logger() -> logging.Logger:
    """Return the logger `zerotrain.script`, which prints as DeepSpeed's does."""
    if not any(isinstance(each, _Fallback) for each in _LOGGER.handlers):
        _LOGGER.addHandler(_Fallback())
        _LOGGER.setLevel(logging.INFO)
    return _LOGGER
