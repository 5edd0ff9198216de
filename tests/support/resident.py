"""Resident memory of the calling process."""

from __future__ import annotations

import gc
from pathlib import Path

from zerotrain.runtime.zero.buffer import return_free_memory


def reset_peak() -> int:
    """Reset the kernel's peak; return the bytes that are resident now."""
    gc.collect()
    return_free_memory()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes() -> int:
    """Return the largest resident memory since `reset_peak`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field} line")
