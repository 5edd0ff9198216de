"""Protection of the process's memory from core files and from other processes of its user.

Called once when an engine starts that spills. The stack dumps that the launcher requests come from inside of
the process (faulthandler), so they still work. Memory shared between ranks is passed through sockets, so it
still works, too.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PR_SET_DUMPABLE = 4
_CORE_FILTER = Path("/proc/self/coredump_filter")

READABLE_VARIABLE = "ZEROTRAIN_KEEP_READABLE"
"""Variable that, set to 1, lets the same user's debuggers and profilers (gdb, py-spy) attach to the ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Secrecy:
    """Protections that the system granted. A field is empty where it was granted, else the reason."""

    core_files: str
    """Result of RLIMIT_CORE = 0: the kernel writes no core file."""

    core_contents: str
    """Result of coredump_filter = 0: a core collector of the host, which no limit stops, gets no memory."""

    reading: str
    """Result of PR_SET_DUMPABLE = 0: no core, and no process of the same user can attach or read memory."""

    @property
    def refused(self) -> Mapping[str, str]:
        """Protections that were not granted, with the reason."""
        fields = {
            "RLIMIT_CORE": self.core_files,
            "coredump_filter": self.core_contents,
            "PR_SET_DUMPABLE": self.reading,
        }
        return {name: reason for name, reason in fields.items() if reason}

    @property
    def text(self) -> str:
        """Summary for the log and the metric's label."""
        if not self.refused:
            return "memory is in no core and not readable by the user's other processes"
        return "; ".join(f"{name} not set: {reason}" for name, reason in self.refused.items())


_granted: list[Secrecy] = []
"""Result of the last `refuse_cores`; one per process, as its limits are."""


def granted_text() -> str:
    """Return the text of the last `refuse_cores`; empty before the first."""
    return _granted[-1].text if _granted else ""


def refuse_cores(*, environ: Mapping[str, str] = os.environ) -> Secrecy:
    """Protect the process's memory. Raises nothing: where the system refuses, training goes on and the reason
    is reported.

    Must be called when descriptors on the process's own `/proc` files are open (comm's page map): for users
    other than root the system does not let them be opened afterwards.
    """
    # The filter comes before PR_SET_DUMPABLE, which makes the filter's file root's.
    contents = _no_core_contents()
    keeps = environ.get(READABLE_VARIABLE) == "1"
    secrecy = Secrecy(
        core_files=_no_core_files(),
        core_contents=contents,
        reading=f"left alone, {READABLE_VARIABLE}=1" if keeps else _not_readable(),
    )
    _granted[:] = [secrecy]
    return secrecy


def _no_core_files() -> str:
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _no_core_contents() -> str:
    try:
        _CORE_FILTER.write_text("0")
    except OSError as error:
        return str(error)
    return ""


def _not_readable() -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        return os.strerror(ctypes.get_errno())
    return ""
