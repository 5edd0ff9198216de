"""Errors of a checkpoint folder, and the exit code with which each ends a rank.

    CheckpointError                the folder cannot be used as asked (exit CHECKPOINT_UNUSABLE)
      CheckpointNotWritable        the operating system rejected a write; nothing half-written stays (exit
                                   STORAGE_FAILED where it may pass, as a server that restarts does)
        CheckpointNoSpace          ... for lack of space: bytes needed and free are in the text
      CheckpointFenced             a newer attempt or another job owns the folder: too late to commit
      CheckpointUnreadable         the volume failed while a checkpoint was read, which says nothing of the
                                   checkpoint (exit STORAGE_FAILED)
      CheckpointDamaged            no checkpoint in the folder is whole, or the one asked for is not
      CheckpointMismatch           whole, but of another model or optimizer (exit BAD_CONFIG)

Every rank raises the same error: the ranks exchange their outcomes before any of them decides.
"""

from __future__ import annotations

import errno
from pathlib import Path

from zerotrain.contract.exit_codes import ExitCode, may_pass

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers for a full disk, a reached quota and a reached file size limit."""


class CheckpointError(Exception):
    """Base of every error of this package."""

    exit_code: ExitCode = ExitCode.CHECKPOINT_UNUSABLE


class CheckpointNotWritable(CheckpointError):
    """Error of a write, sync or rename; the temporary folder is removed, older checkpoints are untouched."""

    def __init__(self, path: Path | str, *, rank: int, code: int, detail: str) -> None:
        self.path = Path(path)
        self.rank = rank
        self.errno = code
        if may_pass(code):
            self.exit_code = ExitCode.STORAGE_FAILED
        super().__init__(f"checkpoint folder {path}: rank {rank} cannot write ({detail})")


class CheckpointNoSpace(CheckpointNotWritable):
    """Error of a lack of space: `bytes_needed` for the whole checkpoint, `bytes_free` left on the disk."""

    def __init__(self, path: Path | str, *, rank: int, code: int, bytes_needed: int, bytes_free: int) -> None:
        self.bytes_needed = bytes_needed
        self.bytes_free = bytes_free
        limit = "the file size limit" if code == errno.EFBIG else "the disk or its quota"
        super().__init__(
            path,
            rank=rank,
            code=code,
            detail=f"{limit} has no space left: {bytes_needed} bytes needed, {bytes_free} free; "
            "free some space or lower checkpoint.keepLast; earlier checkpoints are untouched",
        )


class CheckpointFenced(CheckpointError):
    """Error of an attempt that is not the newest one any more, so it may not commit."""

    @classmethod
    def found(cls, path: Path | str, *, mine: str, fence: str) -> CheckpointFenced:
        """Return the error for an attempt `mine` that found the fence of another."""
        return cls(
            f"checkpoint folder {path} belongs to {fence} now; {mine} came too late and may not write there. "
            "A newer attempt runs: this one must end"
        )


class CheckpointUnreadable(CheckpointError):
    """Error of a read that may succeed later; nothing was marked as damaged and no older checkpoint taken."""

    exit_code = ExitCode.STORAGE_FAILED


class CheckpointDamaged(CheckpointError):
    """Error of checkpoints of which none can be trusted; a silent fresh start would lose the run."""


class CheckpointMismatch(CheckpointError):
    """Error of a model, optimizer or client state that does not fit; the user must change one of them."""

    exit_code = ExitCode.BAD_CONFIG
