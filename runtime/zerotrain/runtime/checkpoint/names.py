"""Names inside a checkpoint folder, and a listing of its committed checkpoints.

fence.json                       newest attempt that owns the folder
latest                           JSON: name of the newest committed step folder
step-0000000040-attempt-2/       one checkpoint: COMMIT, manifest.json, rank-00000-of-00002.safetensors, ...
history/                         outcome of every step, for `zerotrain report`
.tmp-*  .trash-*                 unfinished save, half-removed checkpoint: never read
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.contract.exit_codes import may_pass
from zerotrain.contract.history import HISTORY_DIR
from zerotrain.contract.regular_file import read_regular
from zerotrain.contract.strict_json import JsonError, strict_json

FENCE = "fence.json"
LOCK = "fence.lock"
LATEST = "latest"
MANIFEST = "manifest.json"
COMMIT = "COMMIT"
DAMAGED = "DAMAGED"
BUFFER_PREFIX = "buffer/"
"""Start of a module buffer's key in the tensor file of rank 0."""
EXTRA_STATE = "extra_state"
"""Key of the manifest's scalars for what modules add to a state dict, by its key there."""
TMP_PREFIX = ".tmp-"
TRASH_PREFIX = ".trash-"
MAX_RECORD_BYTES = 64 << 10
"""Greatest size of a COMMIT, a DAMAGED record or the fence."""
MAX_MANIFEST_BYTES = 1 << 30
"""Greatest size of a manifest. It names all pieces of all parameters: some 100
bytes for each of tensors x ranks at worst."""
_MAX_NUMBER = 2**63 - 1

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STEP_FOLDER = re.compile(r"step-\d{10}-attempt-\d+")
_RANK_FILE = re.compile(r"rank-\d{5,}-of-\d{5,}\.safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """One checkpoint whose COMMIT record is readable. `sequence` grows with every commit in the folder."""

    path: Path
    step: int
    attempt: int
    sequence: int
    manifest_sha256: str
    job_uid: str = ""
    is_latest: bool = True
    """Whether a load without a tag may take the checkpoint."""


def step_folder(step: int, attempt: int) -> str:
    """Return the folder name of a checkpoint without a tag; it sorts by step."""
    return f"step-{step:010d}-attempt-{attempt}"


def is_step_folder(name: str) -> bool:
    """Return whether a folder got its name from `step_folder` (and not from a tag)."""
    return _STEP_FOLDER.fullmatch(name) is not None


def rank_file(rank: int, world_size: int) -> str:
    """Return the name of the tensor file that `rank` writes."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def is_rank_file(name: str) -> bool:
    """Return whether a file got its name from `rank_file`."""
    return _RANK_FILE.fullmatch(name) is not None


def check_tag(tag: str) -> str:
    """Return `tag` when it can be a folder name of ours. Raises ValueError otherwise."""
    own = (LATEST, FENCE, LOCK, HISTORY_DIR)
    if not _TAG.fullmatch(tag) or tag in own:
        raise ValueError(
            f"checkpoint tag {tag!r} is not usable as a folder name; take up to 100 letters, digits, dots, "
            f"dashes and underscores, starting with a letter or digit, and none of {', '.join(own)}, which "
            "the checkpoint folder has itself. Without a tag the newest is loaded"
        )
    return tag


def read_commit(path: Path) -> Committed:
    """Return the COMMIT record of a step folder. Raises ValueError or OSError when it is torn or missing."""
    record = _object(read_regular(path / COMMIT, MAX_RECORD_BYTES))
    values = {name: record.get(name) for name in ("step", "attempt", "sequence")}
    digest, job_uid = record.get("manifest_sha256"), record.get("job_uid")
    if not all(map(is_count, values.values())) or not isinstance(digest, str):
        raise ValueError(f"{COMMIT} is torn: {str(record)[:200]}")
    return Committed(
        path=path,
        manifest_sha256=digest,
        job_uid=str(job_uid),
        is_latest=record.get("is_latest") is not False,  # earlier versions did not write it
        **values,  # type: ignore[arg-type]
    )


def folders(directory: Path) -> list[Path]:
    """Return every folder that may be a checkpoint: no temporary, trash or hidden ones; may be none."""
    try:
        return sorted(
            Path(entry.path)
            for entry in os.scandir(directory)
            if entry.is_dir() and not entry.name.startswith(".")
        )
    except FileNotFoundError:
        return []


def committed(directory: Path) -> list[Committed]:
    """Return checkpoints with a readable COMMIT record, newest commit first. Raises OSError where the volume
    fails, which says nothing of a record."""
    found = []
    for path in folders(directory):
        try:
            found.append(read_commit(path))
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and may_pass(error.errno):
                raise
    return sorted(found, key=lambda item: item.sequence, reverse=True)


def is_count(value: object) -> bool:
    """Return whether a value can be a step, an attempt or a sequence number of a record."""
    return type(value) is int and 0 <= value <= _MAX_NUMBER


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = strict_json(data)
    except JsonError as error:
        raise ValueError(f"{COMMIT} {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{COMMIT} must hold a JSON object; it holds a {type(value).__name__}")
    return value
