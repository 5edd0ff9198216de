"""Contents and condition of a checkpoint folder. Without torch: `zerotrain checkpoint ls|verify`.

`survey` looks at names, records and sizes; `verify` also reads every byte, as a load does.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from zerotrain.contract.exit_codes import may_pass
from zerotrain.contract.regular_file import read_regular
from zerotrain.contract.strict_json import JsonError, read_json, strict_json
from zerotrain.runtime.checkpoint.manifest import Manifest
from zerotrain.runtime.checkpoint.names import (
    BUFFER_PREFIX,
    COMMIT,
    DAMAGED,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_RECORD_BYTES,
    TMP_PREFIX,
    Committed,
    committed,
    is_rank_file,
    is_step_folder,
    read_commit,
)
from zerotrain.runtime.checkpoint.rawfile import hash_file, tensor_sizes


class Condition(StrEnum):
    """Condition of a checkpoint, as far as it was examined."""

    WHOLE = "whole"
    DAMAGED = "damaged"  # committed at some time: a load passes over it
    PARTIAL = "partial"  # never committed: a save that is under way, or that was killed


@dataclass(frozen=True, kw_only=True, slots=True)
class Surveyed:
    """One checkpoint of a folder; numbers are None where no record has them."""

    path: Path
    condition: Condition
    reason: str = ""
    step: int | None = None
    attempt: int | None = None
    job_uid: str = ""
    world_size: int | None = None
    """Number of ranks that wrote the checkpoint."""
    created_at: float | None = None
    """Time of creation in Unix seconds."""
    num_bytes: int = 0
    is_latest: bool = False
    """Whether a load without a tag takes the checkpoint."""


def survey(directory: Path) -> list[Surveyed]:
    """Return every checkpoint of a run's folder, newest commit first, the unfinished last. Raises OSError,
    also where the volume fails while one is examined."""
    found: list[Path] = []
    partial: list[Path] = []
    for entry in sorted(os.scandir(directory), key=lambda item: item.name):
        path = Path(entry.path)
        if not entry.is_dir():
            continue
        if entry.name.startswith(TMP_PREFIX):
            partial.append(path)
        elif not entry.name.startswith(".") and _looks_like_one(path):
            found.append(path)
    order = {item.path: item.sequence for item in committed(directory)}
    found.sort(key=lambda path: order.get(path, -1), reverse=True)
    rows = [look_at(path) for path in found]
    newest = next(
        (row.path for row in rows if row.condition is Condition.WHOLE and _may_be_latest(row.path)), None
    )
    return [
        *(replace(row, is_latest=row.path == newest) for row in rows),
        *(
            Surveyed(path=path, condition=Condition.PARTIAL, reason="not committed", num_bytes=_size(path))
            for path in partial
        ),
    ]


def look_at(path: Path) -> Surveyed:
    """Examine one checkpoint by its records and sizes. Raises OSError where the volume fails."""
    try:
        manifest = read_manifest(path)
        problem = next(_size_problems(manifest, path), None) or _note(path)
    except (OSError, ValueError) as error:
        return Surveyed(
            path=path, condition=Condition.DAMAGED, reason=damage_of(error), num_bytes=_size(path)
        )
    return Surveyed(
        path=path,
        condition=Condition.DAMAGED if problem else Condition.WHOLE,
        reason=problem or "",
        step=manifest.step,
        attempt=manifest.attempt,
        job_uid=manifest.job_uid,
        world_size=manifest.world_size,
        created_at=manifest.created_at,
        num_bytes=_size(path),
    )


def absence(path: Path) -> str | None:
    """Describe what is missing where `path` is no checkpoint, not even a damaged one; None where it is one.

    Raises OSError where this cannot be determined: the volume fails, or a folder is not accessible.
    """
    if any(_is_there(path / name) for name in (MANIFEST, COMMIT)):
        return None
    if _is_there(path):
        return f"{path} holds neither {MANIFEST} nor {COMMIT}"
    return f"{path.parent} holds no {path.name}" if _is_there(path.parent) else f"{path.parent} is not there"


def may_be_foreign(path: Path) -> bool:
    """Return whether the contents of `path`, an `absence`, may be a whole checkpoint in a foreign format.

    They are none where nothing is there, and where the name or a file in it is of a kind that only this
    package writes: that is one of ours with parts missing. Raises OSError where this cannot be determined.
    """
    if is_step_folder(path.name) or not _is_there(path):
        return False
    try:
        inside = os.listdir(path)
    except NotADirectoryError:
        return True
    return not any(is_rank_file(name) or name == DAMAGED for name in inside)


def resolve(path: Path) -> Path:
    """Return a checkpoint's own folder, given that or a run's folder (then its newest whole one).

    Raises ValueError when there is none.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder")
    if _looks_like_one(path):
        return path
    for row in survey(path):
        if row.is_latest:
            return row.path
    raise ValueError(f"{path} holds no whole checkpoint")


def read_manifest(path: Path) -> Manifest:
    """Return the manifest whose digest COMMIT has. Raises OSError, or ValueError when one is damaged."""
    commit = read_commit(path)
    data = read_regular(path / MANIFEST, MAX_MANIFEST_BYTES)
    if hashlib.sha256(data).hexdigest() != commit.manifest_sha256:
        raise ValueError(f"{MANIFEST} does not have the digest that {COMMIT} records")
    try:
        record = strict_json(data, max_bytes=MAX_MANIFEST_BYTES)
    except JsonError as error:
        raise ValueError(f"{MANIFEST} {error}") from error
    return Manifest.parse(record)


def verify(path: Path, progress: Callable[[int], object]) -> list[str]:
    """Return everything that is wrong with a checkpoint: digests, sizes, coverage of every parameter,
    tensors.

    `progress` gets the bytes of each chunk that was read. Empty when a load would succeed. Raises OSError
    where the volume fails: that says nothing of the checkpoint.
    """
    try:
        manifest = read_manifest(path)  # reading it also checks the coverage of every parameter
    except (OSError, ValueError) as error:
        return [damage_of(error)]
    problems = list(_size_problems(manifest, path))
    if problems:
        return problems
    for file in manifest.files:
        try:
            if hash_file(path / file.name, progress).sha256 != file.sha256:
                problems.append(f"{file.name} does not have the digest that {MANIFEST} records")
        except OSError as error:
            problems.append(damage_of(error))
    return problems or list(_tensor_problems(manifest, path))


def reason_of(error: Exception) -> str:
    """Return an error of reading a checkpoint in a few words."""
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename or '?').name} is missing"
    if isinstance(error, OSError):
        return f"{Path(error.filename or '?').name} cannot be read: {error.strerror}"
    return str(error)


def damage_of(error: Exception) -> str:
    """Return the `reason_of` an error that shows damage. Raises the error again when it shows that the volume
    failed and may work again."""
    if isinstance(error, OSError) and may_pass(error.errno):
        raise error
    return reason_of(error)


def _is_there(path: Path) -> bool:
    """Return whether a path exists, and raise OSError where the volume fails; `exists` returns False for some
    such errors, which differ between versions of Python."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _looks_like_one(path: Path) -> bool:
    return is_step_folder(path.name) or (path / MANIFEST).exists() or (path / COMMIT).exists()


def _may_be_latest(path: Path) -> bool:
    try:
        commit: Committed = read_commit(path)
    except (OSError, ValueError) as error:
        damage_of(error)
        return False
    return commit.is_latest


def _size_problems(manifest: Manifest, path: Path) -> Iterator[str]:
    for file in manifest.files:
        try:
            size = (path / file.name).stat().st_size
        except OSError as error:
            yield damage_of(error)
            continue
        if size != file.size:
            yield f"{file.name} has {size} bytes instead of {file.size}"


def _tensor_problems(manifest: Manifest, path: Path) -> Iterator[str]:
    """Yield pieces that the files do not hold; only a faulty writer makes such a checkpoint."""
    sizes = [tensor_sizes(path / file.name) for file in manifest.files]
    for fqn, entry in manifest.tensors.items():
        for kind, dtype in manifest.units[entry.unit].kinds.items():
            key = f"{entry.unit}/{kind}"
            for piece in entry.pieces:
                held, numel = sizes[piece.file].get(key, ("nothing", 0))
                if held != dtype or piece.offset + piece.length > numel:
                    yield (
                        f"{manifest.files[piece.file].name} holds {numel} elements of {held} under {key!r}; "
                        f"{fqn!r} needs {dtype} up to {piece.offset + piece.length}"
                    )
    for fqn in manifest.buffers:
        if f"{BUFFER_PREFIX}{fqn}" not in sizes[0]:
            yield f"{manifest.files[0].name} holds no buffer {fqn!r}"


def _note(path: Path) -> str:
    """Return the reason that a load left which could not read the checkpoint."""
    try:
        return str(read_json(path / DAMAGED, max_bytes=MAX_RECORD_BYTES)["reason"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        damage_of(error)
        return "marked as damaged"


def _size(path: Path) -> int:
    total = 0
    for file in path.iterdir():
        try:
            total += file.stat().st_size
        except OSError:
            continue  # being written or removed now
    return total
