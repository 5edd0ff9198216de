"""The outcome of one rank, and the agreement by which all ranks raise the same error for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zerotrain.runtime.checkpoint.errors import (
    NO_SPACE,
    CheckpointError,
    CheckpointFenced,
    CheckpointNoSpace,
    CheckpointNotWritable,
)
from zerotrain.runtime.checkpoint.files import free_bytes
from zerotrain.runtime.checkpoint.group import RankGroup

_OK, _REFUSED, _FENCED = 0, -1, -2


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveResult:
    """A checkpoint that is durable, or still being written in the background (`durable` False)."""

    path: Path
    step: int
    time: float
    """Unix seconds at the commit; 0 before."""
    num_bytes: int
    """Bytes that this rank wrote."""
    seconds: float
    """Seconds from the call to the commit; 0 before."""
    stall_seconds: float = 0.0
    """The part of `seconds` in which training was blocked."""
    removed: tuple[str, ...] = ()
    """Names of older checkpoints that retention removed (known to rank 0 only)."""
    durable: bool = True


@dataclass(kw_only=True)
class Outcome:
    """The outcome of one rank. `code` is an errno, or one of the negative codes above; texts are exchanged
    only after a failure."""

    code: int = _OK
    bytes_needed: int = 0
    bytes_free: int = 0
    text: str = ""

    @property
    def succeeded(self) -> bool:
        return self.code == _OK

    @classmethod
    def of(
        cls,
        action: Callable[[], None],
        directory: Path,
        *,
        catch: type[Exception] | tuple[type[Exception], ...] = (
            CheckpointError,
            OSError,
            ValueError,
            TypeError,
        ),
    ) -> Outcome:
        """Run `action` and return its outcome; errors that a checkpoint may meet are caught, others pass."""
        try:
            action()
        except catch as error:
            return cls.failed(error, directory)
        return cls()

    @classmethod
    def failed(cls, error: Exception, directory: Path) -> Outcome:
        """Return the outcome for an error that was caught."""
        if isinstance(error, CheckpointFenced):
            return cls(code=_FENCED, text=str(error))
        if isinstance(error, OSError):
            text = f"{os.strerror(error.errno or 0)}: {error.filename or directory}"
            return cls(code=error.errno or -1, bytes_free=free_bytes(directory), text=text)
        if isinstance(error, CheckpointError):
            return cls(code=_REFUSED, text=str(error))
        return cls(code=_REFUSED, text=f"checkpoint folder {directory}: the state cannot be stored: {error}")


def agree(group: RankGroup, directory: Path, mine: Outcome) -> None:
    """Return when every rank succeeded; otherwise raise the lowest failing rank's error on every rank."""
    records = group.gather([mine.code, mine.bytes_needed, mine.bytes_free])
    failing = next((rank for rank, record in enumerate(records) if record[0] != _OK), None)
    if failing is None:
        return
    code, _, free = records[failing]
    text = group.broadcast_text(mine.text, source=failing)
    if code == _FENCED:
        raise CheckpointFenced(text)
    if code in NO_SPACE:
        needed = sum(record[1] for record in records)
        raise CheckpointNoSpace(directory, rank=failing, code=code, bytes_needed=needed, bytes_free=free)
    if code > 0:
        raise CheckpointNotWritable(directory, rank=failing, code=code, detail=text)
    raise CheckpointError(text)
