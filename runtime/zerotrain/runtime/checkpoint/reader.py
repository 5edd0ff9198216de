"""Loading at any number of ranks: verify, plan by interval intersection, `pread` only what this rank owns,
one window at a time.

Verification is shared: of n files, rank r of M hashes files r, r + M, r + 2M, ..., so that every byte of a
checkpoint is digested exactly once; the ranks then exchange their findings. A checkpoint that is torn or
damaged is passed over for the next older one and reported in `LoadResult.rejected`. One that is whole but
belongs to another model raises, because an older one would not fit either. A volume that fails raises as
well, because that says nothing of any checkpoint.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from zerotrain.contract.exit_codes import may_pass
from zerotrain.contract.strict_json import strict_json
from zerotrain.runtime.checkpoint import rng
from zerotrain.runtime.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointUnreadable
from zerotrain.runtime.checkpoint.group import Problem, RankGroup, default_group, first_problem
from zerotrain.runtime.checkpoint.inspect import read_manifest, reason_of
from zerotrain.runtime.checkpoint.intervals import Copy, plan_shard, within
from zerotrain.runtime.checkpoint.manifest import Manifest, TensorEntry
from zerotrain.runtime.checkpoint.match import check_match, source_kind, stored_tensors
from zerotrain.runtime.checkpoint.names import (
    BUFFER_PREFIX,
    EXTRA_STATE,
    MANIFEST,
    check_tag,
    committed,
    folders,
    is_step_folder,
    read_commit,
)
from zerotrain.runtime.checkpoint.packing import unpack
from zerotrain.runtime.checkpoint.rawfile import hash_file
from zerotrain.runtime.checkpoint.retention import mark_damaged, reading
from zerotrain.runtime.checkpoint.stored_buffers import StoredBuffers
from zerotrain.runtime.checkpoint.tensorfile import TensorFile
from zerotrain.runtime.zero.state import CheckpointState, StateStream, TensorStream, windows
from zerotrain.runtime.zero.strided import overwrite


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    """The loaded checkpoint; `path` is None when the folder holds no checkpoint (start afresh)."""

    path: Path | None = None
    step: int = 0
    attempt: int = 0
    time: float = 0.0
    """Unix seconds at which the checkpoint was written."""
    world_size: int = 0
    """Number of ranks that wrote the checkpoint."""
    job_uid: str = ""
    """Uid of the job that wrote the checkpoint; empty where none did."""
    client_state: dict[str, Any] = field(default_factory=dict)
    rejected: tuple[tuple[Path, str], ...] = ()
    """Checkpoints that were passed over, with the reason, newest first."""
    rng_restored: bool = False
    """Whether this rank's random generators were restored; a rank that did not exist before keeps its own."""


class _Unusable(Exception):
    """Reason why a checkpoint is passed over, the same on every rank."""


def load(
    state: CheckpointState,
    directory: Path | str,
    tag: str | None = None,
    *,
    of_job: str | None = None,
    group: RankGroup | None = None,
    strict: bool = True,
    restore_rng: bool = True,
) -> LoadResult:
    """Overwrite `state` in place with the newest whole checkpoint, or with the one named `tag`. Collective.

    With `of_job` only checkpoints that this job (its uid) wrote are considered. Only what `state` has streams
    for is read. Not `strict`: what the checkpoint lacks keeps its value. Tensors, scalars and buffers of
    `state` and this process's random generators are replaced; `state` is undefined when this raises. Raises
    CheckpointDamaged when checkpoints exist but none is whole (or `tag` is not), CheckpointUnreadable when
    the volume fails meanwhile, CheckpointMismatch when model or optimizer differ, CheckpointError when ranks
    see other files.
    """
    group, directory = group or default_group(), Path(directory)
    rejected: list[tuple[Path, str]] = []
    for name in _candidates(directory, tag, of_job, group):
        path = directory / name
        try:
            result = _load_one(state, path, group, strict=strict, restore_rng=restore_rng)
        except _Unusable as reason:
            rejected.append((path, str(reason)))
            continue
        if group.rank == 0:
            for bad, text in rejected:
                mark_damaged(bad, text)
        return replace(result, rejected=tuple(rejected))
    if rejected:
        raise CheckpointDamaged(_nothing_usable(directory, tag, rejected))
    return LoadResult()


def _nothing_usable(directory: Path, tag: str | None, rejected: Sequence[tuple[Path, str]]) -> str:
    listed = "; ".join(f"{path.name}: {reason}" for path, reason in rejected)
    if tag is not None:
        names = ", ".join(item.path.name for item in committed(directory)) or "none"
        return (
            f"checkpoint {tag!r} in {directory} cannot be used ({listed}); the folder holds: {names}. "
            "Without a tag the newest whole one is loaded"
        )
    return (
        f"no checkpoint in {directory} can be used ({listed}). Restore one from a backup, or start afresh "
        "with an empty folder or checkpoint.resumeFrom: None"
    )


def _candidates(directory: Path, tag: str | None, of_job: str | None, group: RankGroup) -> list[str]:
    """Return folder names, newest commit first, as rank 0 sees them."""
    if tag is not None:
        return [check_tag(tag)]
    names: list[str] = []
    problem: OSError | None = None
    try:
        names = _newest_first(directory, of_job) if group.rank == 0 else []
    except OSError as error:
        problem = error
    if (found := _compare(group, problem, directory)) is not None:
        raise CheckpointError(f"checkpoint folder {directory} cannot be read: {found.text}")
    text = group.broadcast_text(json.dumps(names), source=0)
    return [str(name) for name in strict_json(text, max_bytes=len(text))]


def _newest_first(directory: Path, of_job: str | None) -> list[str]:
    sequences: dict[str, int] = {}
    torn: list[str] = []
    for path in folders(directory):
        try:
            commit = read_commit(path)
        except (OSError, ValueError) as error:
            if _may_pass(error):
                raise
            # This folder looks like a checkpoint, but its COMMIT is unreadable: report it, never load it.
            if of_job is None and is_step_folder(path.name):
                torn.append(path.name)
        else:
            if commit.is_latest and of_job in (None, commit.job_uid):
                sequences[path.name] = commit.sequence
    newest = sorted(sequences, key=sequences.__getitem__, reverse=True)
    return sorted(torn, reverse=True) + newest


def _load_one(
    state: CheckpointState, path: Path, group: RankGroup, *, strict: bool, restore_rng: bool
) -> LoadResult:
    """Overwrite `state` with a checkpoint. Raises _Unusable on every rank where one cannot read it."""
    with contextlib.ExitStack() as stack:
        with _together(group, path):
            stack.enter_context(reading(path))
            manifest = read_manifest(path)
            _verify_files(manifest, path, group)
        # These are pure functions of what all ranks have and read: every rank raises, or none.
        check_match(manifest, state, strict=strict)
        state.accepts(manifest.scalars)
        with _together(group, path):
            buffers = StoredBuffers.read(manifest, path, state)
        buffers.check(state, strict=strict)
        with _together(group, path):
            restored, client_state = _fill(state, manifest, path, restore_rng=restore_rng)
    return LoadResult(
        path=path,
        step=manifest.step,
        attempt=manifest.attempt,
        time=manifest.created_at,
        world_size=manifest.world_size,
        job_uid=manifest.job_uid,
        client_state=client_state,
        rng_restored=restored,
    )


@contextlib.contextmanager
def _together(group: RankGroup, path: Path) -> Iterator[None]:
    """Read from `path` on every rank, and raise _Unusable on all of them where one could not. Collective."""
    problem: Exception | None = None
    try:
        yield
    except (OSError, ValueError) as error:
        problem = error
    if (found := _compare(group, problem, path)) is not None:
        raise _Unusable(_problem_message(found, group))


def _compare(group: RankGroup, problem: Exception | None, path: Path) -> Problem | None:
    """Return a problem of any rank with `path`. Raises CheckpointUnreadable on every rank where one's volume
    failed: the checkpoint may be whole, and loading an older one would lose steps for nothing."""
    text = reason_of(problem) if problem is not None else None
    found = first_problem(group, text, grave=problem is not None and _may_pass(problem))
    if found is not None and found.is_grave:
        raise CheckpointUnreadable(
            f"the volume failed while {path} was read: {_problem_message(found, group)}. Nothing is known to "
            "be damaged: look after the volume's server and the node's mount"
        )
    return found


def _may_pass(error: Exception) -> bool:
    return isinstance(error, OSError) and may_pass(error.errno)


def _problem_message(found: Problem, group: RankGroup) -> str:
    return found.text if group.world_size == 1 else f"{found.text} (found by rank {found.rank})"


def _verify_files(manifest: Manifest, path: Path, group: RankGroup) -> None:
    for index in range(group.rank, len(manifest.files), group.world_size):
        expected = manifest.files[index]
        size = (path / expected.name).stat().st_size
        if size != expected.size:
            raise ValueError(f"{expected.name} has {size} bytes instead of {expected.size}")
        if hash_file(path / expected.name).sha256 != expected.sha256:
            raise ValueError(f"{expected.name} does not have the digest that {MANIFEST} records")


def _fill(
    state: CheckpointState, manifest: Manifest, path: Path, *, restore_rng: bool
) -> tuple[bool, dict[str, Any]]:
    """Read this rank's part; return whether its random generators were restored, and the client state."""
    with OpenFiles(manifest, path) as files:
        client_state = unpack(dict(manifest.client_state), lambda key: files[0].read(key))
        extra = unpack(manifest.scalars.get(EXTRA_STATE, {}), lambda key: files[0].read(key))
        for unit in state.layout.units:
            streams = {kind: stream for (name, kind), stream in state.streams.items() if name == unit.name}
            if streams:
                _UnitFill.of(state, manifest, unit.name).fill(streams, files)
        for fqn, buffer in state.buffers.items():
            if fqn in manifest.buffers:
                overwrite(buffer, files[0].read(f"{BUFFER_PREFIX}{fqn}"))
        restored = restore_rng and state.rank < manifest.world_size
        if restored:
            file = files[state.rank]
            generators = {key: file.read(key) for key in file.keys() if key.startswith(rng.PREFIX)}  # noqa: SIM118
            restored = bool(generators)  # an imported checkpoint has none
            if restored:
                rng.restore(generators, manifest.files[state.rank].rng)
    state.extra = {key: value for key, value in extra.items() if key in state.extra}
    state.scalars.clear()
    state.scalars.update(manifest.scalars)
    return restored, client_state


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnitFill:
    """Sources of this rank's interval of one unit."""

    copies: tuple[tuple[TensorEntry, tuple[Copy, ...]], ...]
    """Stored entry and copies of each parameter, in the order of the interval."""
    manifest: Manifest
    is_complete: bool
    """Whether the checkpoint holds every parameter of the unit."""

    @classmethod
    def of(cls, state: CheckpointState, manifest: Manifest, unit_name: str) -> _UnitFill:
        stored = stored_tensors(manifest, state.layout, unit_name)
        pieces = {fqn: entry.pieces for fqn, entry in stored.items()}
        planned = plan_shard(state.layout, unit_name, state.rank, pieces)
        return cls(
            copies=tuple((stored[fqn], copies) for fqn, copies in planned),
            manifest=manifest,
            is_complete=len(stored) == len(state.layout.unit(unit_name).segments),
        )

    def fill(self, streams: Mapping[str, StateStream], files: OpenFiles) -> None:
        """Overwrite the streams, every kind of a window before the next. Raises OSError and ValueError."""
        sources = {kind: self._sources(kind) for kind in streams}
        for start, stop in windows(max(stream.numel for stream in streams.values())):
            for kind, stream in streams.items():
                self._fill_window(stream, sources[kind], (start, stop), files)

    def _sources(self, kind: str) -> list[tuple[str, tuple[Copy, ...]]]:
        """Return stored key and copies of each parameter that has such a state."""
        found = []
        for entry, copies in self.copies:
            source = source_kind(self.manifest, entry, kind)
            if source is not None:  # otherwise it is optional, see check_match
                found.append((f"{entry.unit}/{source}", copies))
        return found

    def _fill_window(
        self,
        stream: StateStream,
        sources: Sequence[tuple[str, tuple[Copy, ...]]],
        window: tuple[int, int],
        files: OpenFiles,
    ) -> None:
        start, stop = window
        if isinstance(stream, TensorStream):
            values = stream.read(start, stop)  # the memory itself: nothing to write back
        elif self.is_complete:
            values = torch.empty(stop - start, dtype=stream.dtype)
        else:
            values = stream.read(start, stop).clone()
        if self.is_complete:
            values.zero_()  # gaps and padding; everything else is overwritten
        for key, copies in sources:
            for copy in within(copies, start, stop):
                target = values[copy.target : copy.target + copy.length]
                files[copy.file].read_into(key, copy.source, target)
        if not isinstance(stream, TensorStream):
            stream.write(start, values)


class OpenFiles:
    """Tensor files of a checkpoint, opened on first use."""

    def __init__(self, manifest: Manifest, path: Path) -> None:
        self._paths = [path / entry.name for entry in manifest.files]
        self._open: dict[int, TensorFile] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    def __getitem__(self, index: int) -> TensorFile:
        if index not in self._open:
            self._open[index] = TensorFile(self._paths[index])
        return self._open[index]
