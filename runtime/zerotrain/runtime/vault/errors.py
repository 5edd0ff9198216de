"""What the vault raises. The trainer turns `exit_code` into the process's; each is final for its vault.

VaultError              the vault cannot be used: broken off, closed, forked, misused
  SpillDoesNotFit       the limit or the disk is too small                      exit 67
  SpillIOError          the device or the file system refused a read or a write
  SpillIntegrityError   the disk returned other bytes than were written         exit 84
"""

from __future__ import annotations

from zerotrain.contract.exit_codes import ExitCode


class VaultError(RuntimeError):
    """The vault cannot be used any more, or was used wrongly."""


class SpillDoesNotFit(VaultError):
    """The spill file is larger than the vault's limit or the free space; the text gives both."""

    exit_code: ExitCode = ExitCode.DOES_NOT_FIT


class SpillIOError(VaultError):
    """A read or a write failed. `errno` is the system's; `offset` is in bytes from the file's start."""

    def __init__(self, message: str, *, errno: int, offset: int, unit: str, rank: int) -> None:
        super().__init__(message)
        self.errno = errno
        self.offset = offset
        self.unit = unit
        self.rank = rank


class SpillIntegrityError(VaultError):
    """Chunks whose authentication failed. Nothing of them was used.

    `offset` is the first one's in bytes from the file's start, `chunk` its index in the record of `unit`;
    `chunks` are the positions in the batch of all of them, for a fused update that did the others.
    """

    exit_code: ExitCode = ExitCode.SPILL_INTEGRITY

    def __init__(
        self, message: str, *, offset: int, unit: str, rank: int, chunk: int, chunks: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.offset = offset
        self.unit = unit
        self.rank = rank
        self.chunk = chunk
        self.chunks = chunks
