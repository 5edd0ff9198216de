"""The start of the importing process; lets a load read a DeepSpeed folder as if it were ours."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.strict_json import strict_json
from zerotrain.runtime.checkpoint.errors import CheckpointError, CheckpointMismatch
from zerotrain.runtime.checkpoint.files import remove_tree
from zerotrain.runtime.checkpoint.from_deepspeed.recognise import deepspeed_path
from zerotrain.runtime.checkpoint.group import RankGroup, default_group
from zerotrain.runtime.checkpoint.names import TMP_PREFIX
from zerotrain.runtime.checkpoint.outcome import Outcome, agree


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """A checkpoint of ours that was imported from one of DeepSpeed's."""

    path: Path
    notices: tuple[str, ...]
    """Messages about contents that were left out."""


def import_checkpoint(source: Path, destination: Path, *, tag: str | None = None) -> Imported:
    """Import the DeepSpeed checkpoint in the folder `source` into the run folder `destination`.

    `source` holds the `*_states.pt` files. Raises CheckpointMismatch for a checkpoint that cannot be
    imported, CheckpointError for one that is damaged, unsafe or cannot be written.
    """
    # With -P nothing in the working directory is imported.
    command = [
        sys.executable,
        "-P",
        "-m",
        __package__,
        str(source),
        str(destination),
        *([tag] if tag else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        answer = strict_json(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        reason = done.stderr.strip().splitlines()[-1:] or [f"it ended with code {done.returncode}"]
        raise CheckpointError(f"importing {source} failed: {reason[0]}") from None
    if "error" in answer:
        kind = CheckpointMismatch if answer["code"] == int(ExitCode.BAD_CONFIG) else CheckpointError
        raise kind(str(answer["error"]))
    return Imported(path=Path(answer["path"]), notices=tuple(answer["notices"]))


@contextlib.contextmanager
def readable(
    directory: Path, tag: str | None, group: RankGroup | None = None
) -> Iterator[tuple[Path, str | None, Path | None]]:
    """Yield `(folder, tag, DeepSpeed's folder or None)` for `load`; a DeepSpeed checkpoint is imported beside
    its folder for the time of the load. Collective; raises the same CheckpointError on every rank."""
    group = group or default_group()
    found = deepspeed_path(directory, tag) if group.rank == 0 else None
    source = group.broadcast_text(str(found or ""), source=0)
    if not source:
        yield directory, tag, None
        return
    target = directory / f"{TMP_PREFIX}import-{Path(source).name}"
    outcome = Outcome()
    if group.rank == 0:
        remove_tree(target)
        outcome = Outcome.of(lambda: _import(Path(source), target), directory)
    try:
        agree(group, directory, outcome)
        yield target, None, Path(source)
    finally:
        # Every rank has read its part: a load ends with an exchange.
        if group.rank == 0:
            remove_tree(target)


def _import(source: Path, target: Path) -> None:
    for notice in import_checkpoint(source, target).notices:
        print(f"checkpoint {source}: {notice}", file=sys.stderr, flush=True)
