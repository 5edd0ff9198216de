"""The exit codes of a worker container and the operator's reaction to each.

Rank processes exit with these codes. The launcher exits with the first failing rank's code, which becomes the
container's, and the operator's failure policy reads it from the pod's status. `zerotrain explain exit-codes`
prints the table.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import Enum, IntEnum


class ExitCode(IntEnum):
    """A code with a defined meaning; any other non-zero code is an application failure."""

    DONE = 0
    BAD_CONFIG = 64
    BAD_DATA = 65
    CHECKPOINT_UNUSABLE = 66
    DOES_NOT_FIT = 67
    BAD_MODEL = 68
    BAD_LAUNCH = 69
    YIELDED = 75
    RENDEZVOUS_TIMEOUT = 82
    DIVERGED = 83
    SPILL_INTEGRITY = 84
    STORAGE_FAILED = 85
    KILLED = 137
    TERMINATED = 143


class RetryClass(Enum):
    """Budget that another attempt is charged to, or the reason why there is none."""

    SUCCESS = "success"
    NEVER = "never"
    """The user must edit something first: the same attempt would end in the same way."""
    YIELD = "yield"
    """No failure: the ranks stopped at one step and a durable checkpoint exists."""
    INFRASTRUCTURE = "infrastructure"
    """Charged to the infrastructure budget, not to the application's."""
    ANOTHER_NODE_ONCE = "another-node-once"
    APPLICATION = "application"
    BY_POD_REASON = "by-pod-reason"
    """The code alone does not decide: OOMKilled, Evicted, Preempted and a lost node share it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitCodeMeaning:
    """One row of the table."""

    code: int
    name: str
    meaning: str
    retry: RetryClass
    way_out: str


def _row(code: ExitCode, meaning: str, retry: RetryClass, way_out: str) -> ExitCodeMeaning:
    return ExitCodeMeaning(code=int(code), name=code.name, meaning=meaning, retry=retry, way_out=way_out)


EXIT_CODES: tuple[ExitCodeMeaning, ...] = (
    _row(ExitCode.DONE, "all steps are done", RetryClass.SUCCESS, "nothing to do"),
    _row(
        ExitCode.BAD_CONFIG,
        "the configuration or the job's training part is wrong",
        RetryClass.NEVER,
        "correct the key that the message names and apply the job again",
    ),
    _row(
        ExitCode.BAD_DATA,
        "the training data is missing, unreadable, empty or too short",
        RetryClass.NEVER,
        "correct data.path, or the volume that holds it",
    ),
    _row(
        ExitCode.CHECKPOINT_UNUSABLE,
        "the checkpoint folder cannot be written (permission, read-only, no space) or read",
        RetryClass.NEVER,
        "make room or give another checkpoint.volume; earlier checkpoints are untouched",
    ),
    _row(
        ExitCode.DOES_NOT_FIT,
        "the model does not fit the memory or the disk that the job asks for",
        RetryClass.NEVER,
        "ask for more, or take the nearest configuration that the message names",
    ),
    _row(
        ExitCode.BAD_MODEL,
        "the model cannot be built",
        RetryClass.NEVER,
        "correct model in the job, or the factory it names",
    ),
    _row(
        ExitCode.BAD_LAUNCH,
        "the launch environment is incomplete or contradicts itself",
        RetryClass.NEVER,
        "start workers through the operator or `zerotrain run`, which write the environment",
    ),
    _row(
        ExitCode.YIELDED,
        "all ranks stopped at the same step on request and the checkpoint is durable",
        RetryClass.YIELD,
        "nothing to do: the job goes on from that step when it may",
    ),
    _row(
        ExitCode.RENDEZVOUS_TIMEOUT,
        "not all ranks met within the rendezvous timeout",
        RetryClass.INFRASTRUCTURE,
        "look for pods that never started (capacity, image, network policy)",
    ),
    _row(
        ExitCode.DIVERGED,
        "the loss stayed non-finite",
        RetryClass.NEVER,
        "lower the learning rate or go back to an earlier checkpoint",
    ),
    _row(
        ExitCode.SPILL_INTEGRITY,
        "spilled state failed authentication: the disk returned other bytes than were written",
        RetryClass.ANOTHER_NODE_ONCE,
        "replace the node's drive",
    ),
    _row(
        ExitCode.STORAGE_FAILED,
        "a volume failed while files were read or written (input/output error, stale handle, timeout), or a "
        "node's disk when the worker started (also full or read-only)",
        RetryClass.INFRASTRUCTURE,
        "look after the volume's server and the node's mount; the job goes on from its last checkpoint",
    ),
    _row(
        ExitCode.KILLED,
        "killed by SIGKILL",
        RetryClass.BY_POD_REASON,
        "OOMKilled: raise resources.memory; otherwise see the pod's reason",
    ),
    _row(
        ExitCode.TERMINATED,
        "ended by SIGTERM before a step boundary came within the grace",
        RetryClass.BY_POD_REASON,
        "raise checkpoint.gracePeriodSeconds above one step plus one checkpoint",
    ),
)

_MAY_PASS = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EREMOTEIO,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EAGAIN,
        errno.EINTR,
        errno.EBUSY,
        errno.ENODEV,
        errno.ENXIO,
        errno.ENOLCK,
    }
)


def may_pass(code: int | None) -> bool:
    """Return whether an `errno` means a volume that may recover, and nothing that a user could correct."""
    return code in _MAY_PASS


NEVER_RETRIED: frozenset[int] = frozenset(row.code for row in EXIT_CODES if row.retry is RetryClass.NEVER)


_SIGNALS = 64
"""The last signal on Linux."""


def signal_of(code: int) -> int | None:
    """Return the signal that a code stands for, as shells and container runtimes encode it.

    Returns None if the code is the program's own, such as 255 of `sys.exit(-1)`.
    """
    number = code - 128
    return number if 0 < number <= _SIGNALS else None


def meaning_of(code: int) -> ExitCodeMeaning:
    """Return the table's row for `code`.

    Signals that the table does not name and other codes get a generic row.
    """
    for row in EXIT_CODES:
        if row.code == code:
            return row
    if (number := signal_of(code)) is not None:
        meaning = f"killed by signal {number}"
    else:
        meaning = "the training program failed"
    return ExitCodeMeaning(
        code=code,
        name=f"EXIT_{code}",
        meaning=meaning,
        retry=RetryClass.APPLICATION,
        way_out="read the failing rank's last lines in the job's status",
    )
