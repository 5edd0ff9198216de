"""Saving: every rank writes its own file into a temporary folder, rank 0 commits it by one rename.

`save` does all of it before it returns: files, a gather of outcomes, the commit, another gather, so that all
ranks know whether the checkpoint is durable. `begin` returns as soon as the state is copied and leaves the
rest to a thread (`background`). Any failure removes the temporary folder and raises the same error on every
rank. Called by the engine's `save_checkpoint`; the engine decides *when* it may be called (never inside
gradient accumulation).
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.contract.worker_environment import LaunchError, LaunchSpec
from zerotrain.runtime.checkpoint.background import BackgroundSave
from zerotrain.runtime.checkpoint.errors import CheckpointError
from zerotrain.runtime.checkpoint.fence import Owner, take_over
from zerotrain.runtime.checkpoint.files import remove_any
from zerotrain.runtime.checkpoint.group import RankGroup, default_group
from zerotrain.runtime.checkpoint.image import Image, check_values
from zerotrain.runtime.checkpoint.names import TMP_PREFIX, TRASH_PREFIX, check_tag, step_folder
from zerotrain.runtime.checkpoint.outcome import Outcome, SaveResult, agree
from zerotrain.runtime.checkpoint.retention import retain
from zerotrain.runtime.checkpoint.staging import Staging
from zerotrain.runtime.checkpoint.stepfolder import StepFolder
from zerotrain.runtime.zero.state import CheckpointState


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """Options of a save; they must be the same on every rank."""

    tag: str | None = None
    """Name of the folder; None = by step and attempt."""
    client_state: Mapping[str, Any] | None = None
    """Values of the caller, of the types that `packing` lists."""
    keep_last: int | None = None
    """Number of step folders that stay after the commit; tagged ones always stay. None = keep all."""
    save_latest: bool = True
    """Whether a load without a tag may take it; also whether `latest`, the hint for people, names it."""
    serial: int = 0
    """Number of earlier saves of this process."""
    owner: Owner | None = None
    """Owner of the folder; None = from the environment."""

    def folder(self, directory: Path, *, step: int, world_size: int) -> StepFolder:
        """Return the folder of the save. Raises ValueError for a tag that cannot be a folder's name."""
        owner = self.owner or owner_from_environment()
        return StepFolder(
            directory=directory,
            name=check_tag(self.tag) if self.tag is not None else step_folder(step, owner.attempt),
            step=step,
            owner=owner,
            world_size=world_size,
            serial=self.serial,
            is_latest=self.save_latest,
            job_folder=job_folder(),
        )


def open_attempt(directory: Path | str, owner: Owner | None = None, group: RankGroup | None = None) -> None:
    """Claim the folder for this attempt, create it if necessary and remove unfinished saves. Collective.

    Call once before loading. Raises CheckpointNotWritable, or CheckpointFenced when a newer attempt owns it.
    """
    directory, group, owner = Path(directory), group or default_group(), owner or owner_from_environment()

    def claim() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        take_over(directory, owner)
        for entry in directory.iterdir():
            if entry.name.startswith((TMP_PREFIX, TRASH_PREFIX)):
                remove_any(entry)

    agree(group, directory, Outcome.of(claim, directory) if group.rank == 0 else Outcome())


def claim_job(group: RankGroup | None = None) -> None:
    """Make this attempt the owner of the job's own folder, wherever it saves. Collective; nothing is removed.

    Does nothing where the launch environment names no folder. Raises CheckpointNotWritable, or
    CheckpointFenced when a newer attempt owns it.
    """
    directory, group, owner = job_folder(), group or default_group(), owner_from_environment()
    if directory is None:
        return

    def claim() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        take_over(directory, owner)

    agree(group, directory, Outcome.of(claim, directory) if group.rank == 0 else Outcome())


def owner_from_environment(environ: Mapping[str, str] | None = None) -> Owner:
    """Return the attempt that the launch environment names; attempt 1 of no job where there is none."""
    try:
        spec = LaunchSpec.from_env(os.environ if environ is None else environ)
    except LaunchError:
        return Owner(attempt=1)
    return Owner(attempt=spec.attempt, job_uid=spec.job_uid)


def job_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the checkpoint folder that the launch environment names; None where there is none."""
    try:
        folder = LaunchSpec.from_env(os.environ if environ is None else environ).checkpoint_dir
    except LaunchError:
        return None
    return None if folder is None else folder.absolute()


def save(
    state: CheckpointState,
    directory: Path | str,
    *,
    step: int,
    group: RankGroup | None = None,
    options: SaveOptions | None = None,
    **given: Any,
) -> SaveResult:
    """Write one checkpoint of `state` and the process's random generators. Collective over `group`.

    Options are the fields of `SaveOptions`, together or one by one. Raises CheckpointNoSpace,
    CheckpointNotWritable, CheckpointFenced or CheckpointError (something in the state has no durable form),
    the same on every rank.
    """
    started = time.monotonic()
    group, options = group or default_group(), options or SaveOptions(**given)
    folder = options.folder(Path(directory), step=step, world_size=state.world_size)
    _check_same_folder(group, folder)
    image, outcome = _image(state, folder, options)
    num_bytes = 0
    if image is not None:
        num_bytes = image.num_bytes
        outcome = Outcome.of(
            lambda: folder.write_file(state.rank, image.tensors, image.rng), folder.directory
        )
    _agree(group, folder, outcome, num_bytes)
    commit = Outcome()
    if group.rank == 0 and image is not None:
        commit = Outcome.of(
            lambda: folder.commit(lambda files: image.manifest(files, folder)), folder.directory
        )
    _agree(group, folder, commit, num_bytes)
    removed: tuple[str, ...] = ()
    if group.rank == 0 and options.keep_last is not None:
        removed = retain(folder.directory, keep_last=options.keep_last)
    seconds = time.monotonic() - started
    return SaveResult(
        path=folder.final,
        step=step,
        time=time.time(),
        num_bytes=num_bytes,
        seconds=seconds,
        stall_seconds=seconds,
        removed=removed,
    )


def begin(
    state: CheckpointState,
    directory: Path | str,
    *,
    step: int,
    group: RankGroup | None = None,
    options: SaveOptions | None = None,
    staging: Staging | None = None,
) -> BackgroundSave:
    """Copy `state` and let a thread write the copy: training may go on when this returns. Collective.

    With `staging` the copy goes there; the save before, which used it too, must have ended.

    Raises CheckpointError on every rank when something in the state has no durable form;
    `BackgroundSave.finish` raises the errors of the disk.
    """
    started = time.monotonic()
    group, options = group or default_group(), options or SaveOptions()
    folder = options.folder(Path(directory), step=step, world_size=state.world_size)
    _check_same_folder(group, folder)
    image, outcome = _image(state, folder, options)
    agree(group, folder.directory, outcome)
    assert image is not None  # otherwise the ranks agreed on an error
    copy = image.detached(staging or Staging())
    return BackgroundSave(copy, folder, group=group, keep_last=options.keep_last, started=started)


def check_storable(
    state: CheckpointState, directory: Path, client_state: Mapping[str, Any] | None, *, group: RankGroup
) -> None:
    """Raise CheckpointError on every rank where a value of the client state or of a module's extra state has
    no durable form. Collective; nothing is written."""
    outcome = Outcome.of(lambda: check_values(client_state or {}, state.extra), directory)
    agree(group, directory, outcome)


def _check_same_folder(group: RankGroup, folder: StepFolder) -> None:
    """Raise CheckpointError on every rank when the ranks would write to folders of different names."""
    names = [name for (name,) in group.gather([zlib.crc32(folder.final.name.encode())])]
    mismatched = [rank for rank, name in enumerate(names) if name != names[0]]
    if mismatched:
        raise CheckpointError(
            f"checkpoint folder {folder.directory}: rank {mismatched[0]} saves under another tag or step "
            f"than rank 0 (here {folder.final.name!r}); give every rank the same tag"
        )


def _image(state: CheckpointState, folder: StepFolder, options: SaveOptions) -> tuple[Image | None, Outcome]:
    try:
        return Image.of(state, options.client_state or {}), Outcome()
    except (ValueError, TypeError) as error:
        return None, Outcome.failed(error, folder.directory)


def _agree(group: RankGroup, folder: StepFolder, outcome: Outcome, num_bytes: int) -> None:
    outcome.bytes_needed = num_bytes
    try:
        agree(group, folder.directory, outcome)
    except CheckpointError:
        # All ranks have stopped writing when the outcomes are known, so one of them can remove the files.
        if group.rank == 0:
            folder.discard()
        raise
