"""The temporary folder of one save: every rank writes a file into it, rank 0 commits it by one rename.

Order of events, each step durable before the next:
  1. every rank: tensor file, synced; then its side record, which appears by a rename once the file is whole
  2. rank 0, when all side records are there, under the folder's lock: fence check, manifest, COMMIT record,
     rename, `latest`
Used by `writer` (all ranks at one moment), `background` (each rank when it is ready) and `from_deepspeed`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.contract.strict_json import read_json
from zerotrain.runtime.checkpoint.errors import CheckpointError
from zerotrain.runtime.checkpoint.fence import Owner, owned
from zerotrain.runtime.checkpoint.files import (
    fsync_folder,
    json_bytes,
    remove_tree,
    replace_durable,
    write_durable,
)
from zerotrain.runtime.checkpoint.manifest import FileEntry, Manifest
from zerotrain.runtime.checkpoint.names import (
    COMMIT,
    LATEST,
    MANIFEST,
    TMP_PREFIX,
    TRASH_PREFIX,
    committed,
    rank_file,
)

if TYPE_CHECKING:
    from zerotrain.runtime.checkpoint.tensorfile import Content


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFolder:
    """One checkpoint that is being written."""

    directory: Path
    name: str
    """Folder name of the checkpoint when it is done."""
    step: int
    owner: Owner
    world_size: int
    """Number of ranks that write a file each."""
    serial: int = 0
    """Number of earlier saves of this process: keeps files of a failed save apart from this one's."""
    is_latest: bool = True
    """Whether `latest` will name the checkpoint, and a load without a tag may take it."""
    job_folder: Path | None = None
    """The job's own checkpoint folder, whose fence counts as well; None = there is none."""

    @property
    def final(self) -> Path:
        return self.directory / self.name

    @property
    def temporary(self) -> Path:
        # A late writer of another job or attempt must not write into our folder; a tag names neither.
        owner = hashlib.sha256(f"{self.owner.job_uid}/{self.owner.attempt}".encode()).hexdigest()[:8]
        return self.directory / f"{TMP_PREFIX}{self.name}-{owner}-{self.serial}"

    def write_file(self, rank: int, tensors: Mapping[str, Content], rng: Mapping[str, Any]) -> None:
        """Write the file of one rank. Raises OSError, after which nothing of it is left."""
        from zerotrain.runtime.checkpoint.tensorfile import write_tensors

        self.directory.mkdir(parents=True, exist_ok=True)
        self.temporary.mkdir(exist_ok=True)
        path = self._file(rank)
        unfinished = self._side_record(rank).with_suffix(".unfinished")
        try:
            written = write_tensors(path, tensors)
            entry = {"name": path.name, "size": written.size, "sha256": written.sha256, "rng": dict(rng)}
            write_durable(unfinished, json_bytes(entry))
            # This is the last step that can fail: rank 0 may commit as soon as this name is there.
            os.rename(unfinished, self._side_record(rank))
        except BaseException:
            for name in (path, unfinished):
                with contextlib.suppress(OSError):
                    name.unlink(missing_ok=True)
            raise

    def is_written(self, rank: int) -> bool:
        """Return whether a rank's file is whole, as far as this rank can see."""
        return self._side_record(rank).exists()

    def commit(self, manifest_of: Callable[[tuple[FileEntry, ...]], Manifest]) -> None:
        """Make the folder a checkpoint, after every rank has written. Raises CheckpointFenced,
        CheckpointError, OSError."""
        files = tuple(self._written_file(rank) for rank in range(self.world_size))
        manifest = json_bytes(manifest_of(files).to_json())
        with owned(self.directory, self.owner, job_folder=self.job_folder):
            keep = {entry.name for entry in files}
            for entry in self.temporary.iterdir():
                if entry.name not in keep:
                    entry.unlink()
            write_durable(self.temporary / MANIFEST, manifest)
            known = committed(self.directory)
            record = {
                "step": self.step,
                "attempt": self.owner.attempt,
                "job_uid": self.owner.job_uid,
                "sequence": 1 + max((item.sequence for item in known), default=0),
                "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
                "is_latest": self.is_latest,
            }
            write_durable(self.temporary / COMMIT, json_bytes(record))
            fsync_folder(self.temporary)
            self._publish()
            if self.is_latest:
                latest = {"folder": self.name, "step": self.step, "attempt": self.owner.attempt}
                replace_durable(self.directory / LATEST, json_bytes(latest))

    def discard(self) -> None:
        """Remove what was written. Only after all ranks have stopped writing."""
        remove_tree(self.temporary)

    def _publish(self) -> None:
        trash = self.directory / f"{TRASH_PREFIX}{self.name}"
        remove_tree(trash)
        if self.final.exists():
            # The same step and attempt again (a rerun without an operator, a tag reused): the new one stays.
            os.rename(self.final, trash)
        os.rename(self.temporary, self.final)
        fsync_folder(self.directory)
        remove_tree(trash)

    def _file(self, rank: int) -> Path:
        return self.temporary / rank_file(rank, self.world_size)

    def _side_record(self, rank: int) -> Path:
        return self._file(rank).with_suffix(".json")

    def _written_file(self, rank: int) -> FileEntry:
        path = self._file(rank)
        try:
            entry = FileEntry(**read_json(self._side_record(rank)))
            found = path.stat().st_size
        except FileNotFoundError as error:
            raise CheckpointError(
                f"checkpoint folder {self.directory}: rank {rank}'s file is not visible to rank 0; "
                "the folder must be one that all workers share"
            ) from error
        if found != entry.size:
            raise CheckpointError(f"{path} has {found} bytes but rank {rank} wrote {entry.size}")
        return entry
