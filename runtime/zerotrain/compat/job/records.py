"""The record that completes a checkpoint folder of another library: sizes and digests of all its files.

It is written last. A folder without it, or whose files differ from it, is no checkpoint to resume from.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerotrain.contract.strict_json import read_json
from zerotrain.runtime.checkpoint.files import fsync_folder, json_bytes, write_durable
from zerotrain.runtime.checkpoint.names import COMMIT, FENCE, LOCK, MANIFEST, MAX_MANIFEST_BYTES, is_count

RECORD = "zerotrain.json"
FORMAT, VERSION = "zerotrain-folder", 1
MAX_THREADS = 8
_CHANGING = (RECORD, FENCE, LOCK)
"""Names of files that are written without the folder being saved anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """One file of a folder."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Step and owner of a saved folder, and its files by their path in it."""

    step: int
    attempt: int
    job_uid: str
    sequence: int
    """Grows with every checkpoint that is completed in the same place."""
    resumable: bool
    """Whether training can go on from it: it holds more than weights."""
    files: Mapping[str, StoredFile]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the file."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Record:
        """Read a record. Raises ValueError, KeyError or TypeError for anything else."""
        if (value["format"], value["version"]) != (FORMAT, VERSION):
            raise ValueError(f"is {value['format']!r} version {value['version']!r}")
        counts = {name: value[name] for name in ("step", "attempt", "sequence")}
        if not all(map(is_count, counts.values())):
            raise ValueError(f"holds a number that is none: {counts}")
        files = {str(name): StoredFile(**entry) for name, entry in value["files"].items()}
        resumable = value["resumable"] is True
        return cls(**counts, job_uid=str(value["job_uid"]), resumable=resumable, files=files)


def read_record(folder: Path) -> Record | None:
    """Return the record of a folder whose files have the sizes in it; None for any other folder."""
    record = _written_record(folder)
    try:
        sizes = {name: (folder / name).stat().st_size for name in record.files} if record else {}
    except OSError:
        return None
    is_whole = record and all(entry.size == sizes[name] for name, entry in record.files.items())
    return record if is_whole else None


def own_entries(folder: Path) -> set[str]:
    """Return the entries of a saved folder that its save wrote; without a record, checkpoints of the engine.
    Others may have written more into it."""
    record = _written_record(folder)
    if record is None:
        return {entry.name for entry in folder.iterdir() if (entry / COMMIT).is_file()}
    return {RECORD, *(Path(name).parts[0] for name in record.files)}


def _written_record(folder: Path) -> Record | None:
    try:
        return Record.parse(read_json(folder / RECORD, max_bytes=MAX_MANIFEST_BYTES))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_record(folder: Path, record: Record) -> None:
    """Complete a folder whose files are durable. Raises OSError."""
    write_durable(folder / RECORD, json_bytes(record.to_json()))
    fsync_folder(folder)


def make_durable(folder: Path) -> None:
    """Sync every file and every name in a folder. Raises OSError."""
    for path in regular_files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    for place, _, _ in os.walk(folder):
        fsync_folder(Path(place))


def describe(folder: Path) -> dict[str, StoredFile]:
    """Return sizes and digests of the files in a folder. The engine's own come from its manifests, which it
    made while it wrote them."""
    known = dict(_of_manifests(folder))
    names = [str(path.relative_to(folder)) for path in regular_files(folder)]
    names = [name for name in names if Path(name).name not in _CHANGING]
    with ThreadPoolExecutor(MAX_THREADS) as threads:
        found = threads.map(lambda name: known.get(name) or stored_file(folder / name), names)
        return dict(zip(names, found, strict=True))


def changed_file(folder: Path, record: Record, names: Iterable[str]) -> str | None:
    """Return what is wrong with one of the named files; None if all are as they were written."""
    for name in names:
        try:
            found = stored_file(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != record.files[name]:
            return f"{name} is not what was written: its digest differs"
    return None


def stored_file(path: Path) -> StoredFile:
    """Return size and digest of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return StoredFile(size=os.fstat(file.fileno()).st_size, sha256=digest)


def regular_files(folder: Path) -> list[Path]:
    """Return every file below a folder, without links."""
    found = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def _of_manifests(folder: Path) -> Iterator[tuple[str, StoredFile]]:
    for path in regular_files(folder):
        if path.name != MANIFEST or not (path.parent / COMMIT).is_file():
            continue
        for entry in read_json(path, max_bytes=MAX_MANIFEST_BYTES)["files"]:
            name = path.parent.joinpath(entry["name"]).relative_to(folder)
            yield str(name), StoredFile(size=entry["size"], sha256=entry["sha256"])
