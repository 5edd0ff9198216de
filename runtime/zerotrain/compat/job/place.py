"""The folder in which the ranks of a job's script start, and the size for which the job was meant.

The root of a worker is read-only, and scripts write into `outputs` and the like beside themselves. So ranks
start in a folder on the checkpoint volume. It has links to what lies in the folder of the image where they
would have started, for the files that a script reads there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from zerotrain.contract.strict_json import read_json
from zerotrain.contract.worker_environment import LaunchError, LaunchSpec, RankEnv
from zerotrain.runtime.checkpoint.files import json_bytes, replace_durable

START_FOLDER = "script"
"""Name of the folder in the job's checkpoint folder."""

SIZE_FILE = "script-size.json"
"""Record of the number of ranks with which the job began."""


def start_in_job(environ: Mapping[str, str] = os.environ) -> bool:
    """Make the job's folder the current one; return False outside of a job with checkpoints. Raises
    OSError."""
    spec = _job(environ)
    if spec is None or spec.checkpoint_dir is None:
        return False
    before, folder = Path.cwd(), spec.checkpoint_dir.absolute() / START_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    if before != folder and before != Path("/"):
        link_files(before, folder)
    if RankEnv.from_env(environ).rank == 0:
        _note_size(spec)
    os.chdir(folder)
    # `-m MODULE` and imports of a script look there.
    sys.path[:] = [path or str(before) for path in sys.path]
    return True


def link_files(source: Path, folder: Path) -> None:
    """Link what is in `source` into `folder` under its name, unless something of that name is there that is
    no link. All ranks do it at the same time."""
    for entry in source.iterdir():
        if entry == folder or folder.is_relative_to(entry):
            continue
        link = folder / entry.name
        if link.is_symlink() and os.readlink(link) != str(entry):
            with contextlib.suppress(FileNotFoundError):
                link.unlink()
        with contextlib.suppress(FileExistsError):
            link.symlink_to(entry)


def first_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks with which the job began; None outside of a job with checkpoints."""
    spec = _job(environ)
    if spec is None or spec.checkpoint_dir is None:
        return None
    return _noted_size(spec) or spec.world_size


def _note_size(spec: LaunchSpec) -> None:
    if spec.checkpoint_dir is not None and _noted_size(spec) is None:
        record = {"job_uid": spec.job_uid, "world_size": spec.world_size}
        replace_durable(spec.checkpoint_dir / SIZE_FILE, json_bytes(record))


def _noted_size(spec: LaunchSpec) -> int | None:
    assert spec.checkpoint_dir is not None
    try:
        record = read_json(spec.checkpoint_dir / SIZE_FILE)
        size, job_uid = record["world_size"], record["job_uid"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return size if job_uid == spec.job_uid and type(size) is int and size > 0 else None


def _job(environ: Mapping[str, str]) -> LaunchSpec | None:
    try:
        return LaunchSpec.from_env(environ)
    except LaunchError:
        return None
