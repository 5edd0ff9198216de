"""Last step that earlier attempts of the job reached: steps up to it are replayed, and do not count as
progress."""

from __future__ import annotations

import os
from pathlib import Path

from zerotrain.contract.history import HISTORY_DIR, file_name, files_of
from zerotrain.contract.strict_json import strict_json

TAIL_BYTES = 64 << 10
"""Bytes read from the end of a file; its last lines are the newest."""

MAX_FILES = 8
"""Largest number of attempts that are read, newest first."""


def reached_step(folder: Path, *, job_uid: str) -> int:
    """Return the last step in the histories of this job in its checkpoint folder; 0 without one. Raises
    nothing."""
    files = files_of(folder / HISTORY_DIR)
    own = [path for path in files if path.name == _own_name(path.name, job_uid)]
    return max((_last_step(path) for path in own[-MAX_FILES:]), default=0)


def _own_name(name: str, job_uid: str) -> str:
    """Return the name that the file would have if it belonged to this job."""
    return file_name(int(name.split("-")[1]), job_uid)


def _last_step(path: Path) -> int:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).splitlines()
    except OSError:
        return 0
    return max((_step(line) for line in lines), default=0)


def _step(line: bytes) -> int:
    """Return the step of a point; 0 for anything else, such as a torn line."""
    try:
        item = strict_json(line)
        step = item["step"] if item["kind"] == "point" else 0
    except (ValueError, KeyError, TypeError):
        return 0
    return step if isinstance(step, int) and 0 <= step < 1 << 53 else 0
