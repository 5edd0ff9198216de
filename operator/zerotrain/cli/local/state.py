"""The state of a run folder between commands: the last attempt's number, and a lock."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerotrain.cli.errors import CliError
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.strict_json import JsonError, read_json

STATE_FILE = "run.json"
LOCK_FILE = "lock"
PRIVATE_UMASK = 0o077


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Hold the run folder for this command. Raises CliError when it is in use or cannot be written.

    Meanwhile a umask keeps the files of the command and its ranks private to the user: other users of the
    machine must not read weights or logs.
    """
    before = os.umask(PRIVATE_UMASK)
    try:
        with _locked(run_dir):
            yield
    finally:
        os.umask(before)


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
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
    """Increment and store the attempt number before the attempt starts, so that none is reused.

    The operator does the same. Raises CliError if the folder belongs to another job.
    """
    path = run_dir / STATE_FILE
    last = 0
    if path.exists():
        owner, last = _read_state(path)
        if owner != job:
            raise CliError(
                f"{run_dir} belongs to the job {owner!r}, not {job!r}",
                next_step="give another folder with --run-dir",
            )
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"job": job, "attempt": last + 1}))
    partial.replace(path)
    return last + 1


def _read_state(path: Path) -> tuple[str, int]:
    """Return the job and the last attempt. Raises CliError for a file of another origin or a damaged one."""
    try:
        state = read_json(path)
        return str(state["job"]), int(state["attempt"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = str(error) if isinstance(error, (OSError, JsonError)) else "is no record of a run"
        raise CliError(
            f"{path}: {what}", next_step="give another folder with --run-dir, or remove this one"
        ) from error
