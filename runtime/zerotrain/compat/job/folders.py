"""A library's folder of checkpoints (`checkpoint-400`, `checkpoint-600`, ...) in a job.

A checkpoint is written beside its place, in a folder of this attempt's own, and moved there when it is whole:

  1. every rank writes its files into `saving`; they are made durable
  2. rank 0, under the lock of the job's folder: fence check, record, rename

So no name `checkpoint-N` ever stands for a half-written one, and an attempt that a newer one has replaced can
write what it likes and completes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from zerotrain.compat.job.records import (
    Record,
    changed_file,
    describe,
    make_durable,
    own_entries,
    read_record,
    write_record,
)
from zerotrain.contract.strict_json import own_json
from zerotrain.contract.worker_environment import RankEnv
from zerotrain.runtime.checkpoint import Owner, claim_job, job_folder, owner_from_environment
from zerotrain.runtime.checkpoint.fence import owned
from zerotrain.runtime.checkpoint.files import fsync_folder, remove_any, remove_tree
from zerotrain.runtime.checkpoint.group import RankGroup, first_problem
from zerotrain.runtime.checkpoint.names import TMP_PREFIX, TRASH_PREFIX
from zerotrain.runtime.checkpoint.outcome import Outcome, SaveResult, agree

SAVING_PREFIX = f"{TMP_PREFIX}trainer-"
REPLACED_PREFIX = ".replaced-"
"""Start of the name of a checkpoint whose successor of the same name is being moved to its place."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A whole checkpoint."""

    path: Path
    record: Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The checkpoint to resume from, None without one, and newer ones that are damaged."""

    path: Path | None
    damaged: tuple[tuple[Path, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputFolder:
    """Folder of checkpoints of one attempt of a job."""

    path: Path
    job_folder: Path
    owner: Owner

    @classmethod
    def in_job(cls, path: str | os.PathLike[str]) -> OutputFolder | None:
        """Return the folder; None outside of a job with checkpoints."""
        folder = job_folder()
        if folder is None:
            return None
        return cls(path=Path(path).absolute(), job_folder=folder, owner=owner_from_environment())

    @property
    def saving(self) -> Path:
        """Folder in which this attempt writes a checkpoint under its name."""
        text = f"{self.owner.job_uid}/{self.owner.attempt}/{self.path}"
        # On the same volume as the result, and out of sight of scripts that list their output folder.
        place = self.job_folder if self.path.is_relative_to(self.job_folder) else self.path
        return place / f"{SAVING_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def open(self, group: RankGroup) -> None:
        """Take the job's folder over for this attempt, and tidy up after an interrupted save. Collective."""
        claim_job(group)

        def tidy() -> None:
            for place in {self.saving.parent, self.path} if self.path.is_dir() else {self.saving.parent}:
                for entry in sorted(place.glob(f"{SAVING_PREFIX}*")):
                    if entry != self.saving:
                        remove_any(entry)
            for entry in sorted(self.path.glob(f"{REPLACED_PREFIX}*")):
                end_replacement(entry, self.path / entry.name.removeprefix(REPLACED_PREFIX))

        agree(group, self.path, Outcome.of(tidy, self.path) if group.rank == 0 else Outcome())

    def complete(self, name: str, *, step: int, resumable: bool, group: RankGroup) -> SaveResult:
        """Make what is in `saving` the checkpoint of this name, on every rank or on none. Collective.

        Raises CheckpointFenced when a newer attempt owns the job, CheckpointNotWritable, CheckpointNoSpace.
        """
        began, written = time.monotonic(), self.saving / name
        local_rank = RankEnv.from_env(os.environ).local_rank
        synced = Outcome.of(lambda: make_durable(written), self.path) if local_rank == 0 else Outcome()
        agree(group, self.path, synced)
        commit = Outcome()
        if group.rank == 0:
            commit = Outcome.of(lambda: self._commit(name, step=step, resumable=resumable), self.path)
        agree(group, self.path, commit)
        final = self.path / name
        record = read_record(final)
        return SaveResult(
            path=final,
            step=step,
            time=time.time(),
            num_bytes=sum(entry.size for entry in record.files.values()) if record and group.rank == 0 else 0,
            seconds=time.monotonic() - began,
        )

    def _commit(self, name: str, *, step: int, resumable: bool) -> None:
        files = describe(self.saving / name)
        self.path.mkdir(parents=True, exist_ok=True)
        with owned(self.job_folder, self.owner):
            record = Record(
                step=step,
                attempt=self.owner.attempt,
                job_uid=self.owner.job_uid,
                sequence=1 + max((item.record.sequence for item in self.whole()), default=0),
                resumable=resumable,
                files=files,
            )
            write_record(self.saving / name, record)
            final, replaced = self.path / name, self.path / f"{REPLACED_PREFIX}{name}"
            end_replacement(replaced, final)
            if final.exists():
                final.rename(replaced)
            (self.saving / name).rename(final)
            fsync_folder(self.path)
            end_replacement(replaced, final)
        remove_tree(self.saving)

    def checkpoints(self) -> list[Path]:
        """Return every folder with the name of a checkpoint, whole or not."""
        if not self.path.is_dir():
            return []
        return sorted(
            path for path in self.path.iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir()
        )

    def whole(self) -> list[Found]:
        """Return the checkpoints with a record, whose files have the sizes in it; newest first."""
        records = [(path, read_record(path)) for path in self.checkpoints()]
        found = [Found(path=path, record=record) for path, record in records if record is not None]
        return sorted(found, key=lambda item: item.record.sequence, reverse=True)

    def resumable(self, *, of_job_only: bool) -> list[Found]:
        """Return the whole checkpoints that training can go on from, this job's own first."""
        found = [item for item in self.whole() if item.record.resumable]
        own = [item for item in found if item.record.job_uid == self.owner.job_uid]
        return own if of_job_only else [*own, *(item for item in found if item not in own)]

    def choose(self, group: RankGroup, *, of_job_only: bool) -> Choice:
        """Return the newest whole checkpoint to resume from, after its files were compared with their
        digests, which the ranks share among them. Collective."""
        mine = self.resumable(of_job_only=of_job_only) if group.rank == 0 else []
        names = own_json(group.broadcast_text(json.dumps([item.path.name for item in mine]), source=0))
        damaged: list[tuple[Path, str]] = []
        for path in (self.path / name for name in names):
            problem = first_problem(group, self._problem(path, group))
            if problem is None:
                return Choice(path=path, damaged=tuple(damaged))
            damaged.append((path, problem.text))
        return Choice(path=None, damaged=tuple(damaged))

    def _problem(self, path: Path, group: RankGroup) -> str | None:
        record = read_record(path)
        if record is None:
            return "its record, or a file in it, is missing or has another size"
        return changed_file(path, record, sorted(record.files)[group.rank :: group.world_size])

    def rotate(self, limit: int | None, *, best: str | None) -> tuple[str, ...]:
        """Remove the oldest checkpoints beyond the limit and return their names. The newest whole one that
        training can go on from stays, and the best."""
        if limit is None or limit < 1:
            return ()
        going = superfluous(
            [path.name for path in self._by_age()],
            keep=limit,
            protected={
                *(item.path.name for item in self.resumable(of_job_only=True)[:1]),
                *([Path(best).name] if best is not None else []),
            },
        )
        for name in going:
            trash = self.path / f"{TRASH_PREFIX}{name}"
            remove_tree(trash)
            (self.path / name).rename(trash)
            remove_tree(trash)
        return going

    def _by_age(self) -> list[Path]:
        """Return the checkpoints, oldest first; those without a record before all others."""
        age = {item.path: item.record.sequence for item in self.whole()}
        return sorted(self.checkpoints(), key=lambda path: (age.get(path, 0), path.stat().st_mtime))


def end_replacement(replaced: Path, final: Path) -> None:
    """Remove a folder whose successor is in its place, or put it back where there is none.

    Scripts write logs and models beside a saved state: what the save did not write moves to the successor.
    """
    if replaced.is_dir() and not final.exists():
        replaced.rename(final)
        return
    if replaced.is_dir() and not replaced.is_symlink():  # a link leads to a folder of the image
        own = own_entries(replaced)
        for entry in sorted(replaced.iterdir()):
            if entry.name not in own and not (final / entry.name).exists():
                entry.rename(final / entry.name)
        fsync_folder(final)
    remove_tree(replaced)


def superfluous(names: list[str], *, keep: int, protected: Collection[str]) -> tuple[str, ...]:
    """Return which of the names, oldest first, may go so that `keep` stay, the protected ones among them."""
    free = [name for name in names if name not in protected]
    num_going = len(names) - max(keep, len(names) - len(free))
    return tuple(free[: max(num_going, 0)])
