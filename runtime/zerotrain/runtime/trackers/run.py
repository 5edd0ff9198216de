"""Identity of the run that trackers write to: the same in all attempts of a job."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zerotrain.contract.history import HISTORY_DIR
from zerotrain.contract.worker_environment import LaunchError, LaunchSpec

ID_FILE = "tracker-run"
"""File beside the histories with the id of a run whose job has no unique UID."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run in every tracker."""

    id: str
    """32 hexadecimal digits."""
    name: str
    base: Path
    """Folder that relative paths are below."""
    attempt: int = 1
    samples_per_step: int = 1
    facts: Mapping[str, str]
    """Texts that trackers show beside the numbers."""


def run_of_process(*, samples_per_step: int, environ: Mapping[str, str] = os.environ) -> Run:
    """Return the run of this process's job; a new one where no launcher started it."""
    launch = _launch(environ)
    if launch is None:
        made = uuid.uuid4().hex
        return Run(id=made, name=made[:8], base=Path.cwd(), samples_per_step=samples_per_step, facts={})
    folder = launch.checkpoint_dir
    run_id = re.sub(r"[^0-9a-f]", "", launch.job_uid.lower())
    is_local = len(run_id) != 32
    if is_local:
        run_id = _stored_id(folder)
    return Run(
        id=run_id,
        name=launch.job,
        base=folder or Path.cwd(),
        attempt=launch.attempt,
        samples_per_step=samples_per_step,
        facts={
            "job": launch.job,
            "attempt": str(launch.attempt),
            "ranks": str(launch.world_size),
            "report": f"zerotrain report {folder if is_local and folder is not None else launch.job}",
        },
    )


def _launch(environ: Mapping[str, str]) -> LaunchSpec | None:
    try:
        return LaunchSpec.from_env(environ)
    except LaunchError:
        return None


def _stored_id(folder: Path | None) -> str:
    """Return the id in the job's checkpoint folder, made by its first attempt; a new one where there is none
    or it cannot be kept."""
    made = uuid.uuid4().hex
    if folder is None:
        return made
    file = folder / HISTORY_DIR / ID_FILE
    with suppress(OSError, UnicodeDecodeError):
        if re.fullmatch(r"[0-9a-f]{32}", found := file.read_text().strip()):
            return found
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(made + "\n")
    return made
