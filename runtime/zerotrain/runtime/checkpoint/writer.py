"""Saving: every rank writes its own file into a temporary folder, rank 0 commits it by one rename.

Order of events, each step durable before the next:
  1. every rank: tensor file and its side record, synced; then the ranks compare outcomes (a gather)
  2. rank 0, under the folder's lock: fence check, manifest, COMMIT record, rename, `latest`
  3. the ranks compare outcomes again, so that all of them know whether the checkpoint is durable
Any failure removes the temporary folder and raises the same error on every rank. Called by the engine's
`save_checkpoint`; the engine decides *when* it may be called (never inside gradient accumulation).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerotrain.contract.launch import LaunchError, LaunchSpec
from zerotrain.runtime.checkpoint import rng
from zerotrain.runtime.checkpoint.errors import CheckpointError
from zerotrain.runtime.checkpoint.fence import Owner, check_owner, folder_lock, take_over
from zerotrain.runtime.checkpoint.files import (
    fsync_folder,
    json_bytes,
    remove_any,
    remove_tree,
    replace_durable,
    write_durable,
)
from zerotrain.runtime.checkpoint.group import RankGroup, default_group
from zerotrain.runtime.checkpoint.intervals import stored_pieces
from zerotrain.runtime.checkpoint.manifest import FileEntry, Manifest, TensorEntry, UnitEntry
from zerotrain.runtime.checkpoint.names import (
    COMMIT,
    LATEST,
    MANIFEST,
    TMP_PREFIX,
    TRASH_PREFIX,
    check_tag,
    committed,
    rank_file,
    step_folder,
)
from zerotrain.runtime.checkpoint.outcome import Outcome, agree
from zerotrain.runtime.checkpoint.retention import retain
from zerotrain.runtime.checkpoint.tensorfile import dtype_name, file_size, write_tensors
from zerotrain.runtime.zero.state import CheckpointState

BUFFER_PREFIX = "buffer/"


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveResult:
    """A checkpoint that is durable now."""

    path: Path
    step: int
    time: float
    """Unix seconds at the commit."""
    num_bytes: int
    """Bytes this rank wrote."""
    seconds: float
    """From the call to the commit."""
    removed: tuple[str, ...] = ()
    """Older checkpoints that retention removed (known to rank 0 only)."""


def open_attempt(directory: Path | str, owner: Owner | None = None, group: RankGroup | None = None) -> None:
    """Claim the folder for this attempt, create it if need be and clear unfinished saves. Collective.

    Call once before loading. Raises CheckpointNotWritable, or CheckpointFenced when a newer attempt has it.
    """
    directory, group, owner = Path(directory), group or default_group(), owner or owner_from_environment()

    def claim() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        take_over(directory, owner)
        for entry in directory.iterdir():
            if entry.name.startswith((TMP_PREFIX, TRASH_PREFIX)):
                remove_any(entry)

    agree(group, directory, Outcome.of(claim, directory) if group.rank == 0 else Outcome())


def owner_from_environment(environ: Mapping[str, str] | None = None) -> Owner:
    """The attempt that the launch environment names; attempt 1 of no job where there is none."""
    try:
        spec = LaunchSpec.from_env(os.environ if environ is None else environ)
    except LaunchError:
        return Owner(attempt=1)
    return Owner(attempt=spec.attempt, job_uid=spec.job_uid)


def save(
    state: CheckpointState,
    directory: Path | str,
    *,
    step: int,
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    owner: Owner | None = None,
    keep_last: int | None = None,
    group: RankGroup | None = None,
) -> SaveResult:
    """Write one checkpoint of `state` and the process's random generators. Collective over `group`.

    `client_state` must be JSON-able (tuples come back as lists). With `keep_last` older step folders are
    removed after the commit; tagged ones never are. Raises CheckpointNoSpace, CheckpointNotWritable,
    CheckpointFenced or CheckpointError (something in the state has no durable form), the same on every rank.
    """
    started = time.monotonic()
    group = group or default_group()
    owner = owner or owner_from_environment()
    job = _Save(
        state=state,
        directory=Path(directory),
        step=step,
        name=check_tag(tag) if tag is not None else step_folder(step, owner.attempt),
        owner=owner,
        client_state=dict(client_state or {}),
    )
    job.run(group)
    removed: tuple[str, ...] = ()
    if group.rank == 0 and keep_last is not None:
        removed = retain(job.directory, keep_last=keep_last)
    return SaveResult(
        path=job.final,
        step=step,
        time=time.time(),
        num_bytes=job.num_bytes,
        seconds=time.monotonic() - started,
        removed=removed,
    )


@dataclass(kw_only=True)
class _Save:
    """One save on one rank."""

    state: CheckpointState
    directory: Path
    step: int
    name: str
    owner: Owner
    client_state: dict[str, Any]
    num_bytes: int = 0

    @property
    def final(self) -> Path:
        return self.directory / self.name

    @property
    def temporary(self) -> Path:
        # A late writer of another job or attempt must not meet ours in one folder; a tag names neither.
        owner = hashlib.sha256(f"{self.owner.job_uid}/{self.owner.attempt}".encode()).hexdigest()[:8]
        return self.directory / f"{TMP_PREFIX}{self.name}-{owner}"

    def run(self, group: RankGroup) -> None:
        try:
            tensors, scalars = self._tensors()
        except ValueError as error:
            tensors, scalars, outcome = {}, {}, Outcome.failed(error, self.directory)
        else:
            self.num_bytes = file_size(tensors)
            outcome = Outcome.of(lambda: self._write_rank(tensors, scalars), self.directory)
        outcome.bytes_needed = self.num_bytes
        self._agree(group, outcome)
        commit = Outcome.of(self._commit, self.directory) if group.rank == 0 else Outcome()
        commit.bytes_needed = self.num_bytes
        self._agree(group, commit)

    def _agree(self, group: RankGroup, outcome: Outcome) -> None:
        try:
            agree(group, self.directory, outcome)
        except CheckpointError:
            # All ranks have stopped writing when the outcomes are known, so one of them can clear up.
            if group.rank == 0:
                remove_tree(self.temporary)
            raise

    def _tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        state = self.state
        tensors: dict[str, torch.Tensor] = {}
        for (unit, kind), tensor in sorted(state.streams.items()):
            expected = state.layout.shard_numel(unit)
            if tensor.dim() != 1 or tensor.numel() != expected:
                raise ValueError(
                    f"stream {unit}/{kind} must be 1-D with {expected} elements; "
                    f"got shape {tuple(tensor.shape)}"
                )
            tensors[f"{unit}/{kind}"] = tensor
        if state.rank == 0:
            tensors |= {f"{BUFFER_PREFIX}{fqn}": buffer for fqn, buffer in sorted(state.buffers.items())}
        generators, scalars = rng.capture()
        for key, tensor in (tensors | generators).items():
            dtype_name(tensor, key)
        return tensors | generators, scalars

    def _write_rank(self, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.temporary.mkdir(exist_ok=True)
        path = self.temporary / rank_file(self.state.rank, self.state.world_size)
        try:
            written = write_tensors(path, tensors)
            entry = {"name": path.name, "size": written.size, "sha256": written.sha256, "rng": dict(scalars)}
            write_durable(_side_record(path), json_bytes(entry))
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise

    def _commit(self) -> None:
        files = tuple(self._written_file(rank) for rank in range(self.state.world_size))
        manifest = json_bytes(self._manifest(files).to_json())
        with folder_lock(self.directory):
            check_owner(self.directory, self.owner)
            keep = {entry.name for entry in files}
            for leftover in self.temporary.iterdir():
                if leftover.name not in keep:
                    leftover.unlink()
            write_durable(self.temporary / MANIFEST, manifest)
            known = committed(self.directory)
            record = {
                "step": self.step,
                "attempt": self.owner.attempt,
                "job_uid": self.owner.job_uid,
                "sequence": 1 + max((item.sequence for item in known), default=0),
                "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
            }
            write_durable(self.temporary / COMMIT, json_bytes(record))
            fsync_folder(self.temporary)
            self._publish()
            latest = {"folder": self.name, "step": self.step, "attempt": self.owner.attempt}
            replace_durable(self.directory / LATEST, json_bytes(latest))

    def _publish(self) -> None:
        trash = self.directory / f"{TRASH_PREFIX}{self.name}"
        remove_tree(trash)
        if self.final.exists():
            # Same step and attempt again (a rerun without an operator, a tag reused): the new one stays.
            os.rename(self.final, trash)
        os.rename(self.temporary, self.final)
        fsync_folder(self.directory)
        remove_tree(trash)

    def _written_file(self, rank: int) -> FileEntry:
        path = self.temporary / rank_file(rank, self.state.world_size)
        try:
            entry = FileEntry(**json.loads(_side_record(path).read_bytes()))
            found = path.stat().st_size
        except FileNotFoundError as error:
            raise CheckpointError(
                f"checkpoint folder {self.directory}: rank {rank}'s file is not visible to rank 0; "
                "the folder must be one that all workers share"
            ) from error
        if found != entry.size:
            raise CheckpointError(f"{path} has {found} bytes but rank {rank} wrote {entry.size}")
        return entry

    def _manifest(self, files: tuple[FileEntry, ...]) -> Manifest:
        layout = self.state.layout
        pieces = stored_pieces(layout)
        units = {
            unit.name: UnitEntry(
                trainable=unit.trainable,
                kinds={
                    kind: dtype_name(tensor, kind)
                    for (name, kind), tensor in sorted(self.state.streams.items())
                    if name == unit.name
                },
            )
            for unit in layout.units
        }
        tensors = {
            segment.fqn: TensorEntry(unit=unit.name, shape=segment.shape, pieces=pieces[segment.fqn])
            for unit in layout.units
            for segment in unit.segments
        }
        return Manifest(
            step=self.step,
            attempt=self.owner.attempt,
            job_uid=self.owner.job_uid,
            created_at=time.time(),
            world_size=self.state.world_size,
            align=layout.align,
            files=files,
            units=units,
            tensors=tensors,
            aliases=dict(layout.aliases),
            buffers=tuple(sorted(self.state.buffers)),
            scalars=self.state.scalars,
            client_state=self.client_state,
        )


def _side_record(path: Path) -> Path:
    return path.with_suffix(".json")
