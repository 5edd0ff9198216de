"""What a run folder remembers between commands: the last attempt's number; and that one command uses it."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerotrain.cli.errors import CliError
from zerotrain.contract.exit_codes import ExitCode

STATE_FILE = "run.json"
LOCK_FILE = "lock"


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Hold the run folder for this command. Raises CliError when it is in use or cannot be written."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / LOCK_FILE).open("w")
    except OSError as error:
        raise CliError(
            f"{run_dir}: {error.strerror}",
            code=int(ExitCode.CHECKPOINT_UNUSABLE),
            next_step="give a folder that you may write with --run-dir",
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CliError(
                f"{run_dir} is in use by another `zerotrain run`",
                next_step="wait for it, or give another folder with --run-dir",
            ) from error
        yield


def next_attempt(run_dir: Path, job: str) -> int:
    """Count up and remember before anything of the attempt starts, as the operator does: never reused."""
    path = run_dir / STATE_FILE
    last = 0
    if path.exists():
        state = json.loads(path.read_text())
        if state["job"] != job:
            raise CliError(
                f"{run_dir} belongs to the job {state['job']!r}, not {job!r}",
                next_step="give another folder with --run-dir",
            )
        last = int(state["attempt"])
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"job": job, "attempt": last + 1}))
    partial.replace(path)
    return last + 1
