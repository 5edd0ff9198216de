"""Exit codes of commands that fail: stable, and separate from the exit codes of workers; 64, 66 and 67 have
the same meaning in both.

`zerotrain run` ends with its job's code (`contract.exit_codes`); everything else ends with 0 or with one of
these. Printed by `zerotrain explain exit-code`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class CommandExit(IntEnum):
    """Reasons for which a command fails. Scripts rely on them: never renumber one."""

    DIFFERENT = 1
    USAGE = 2
    INVALID = 64
    CHECKPOINT_UNUSABLE = 66
    DOES_NOT_FIT = 67
    UNREACHABLE = 70
    NO_KUBECONFIG = 71
    UNAUTHENTICATED = 72
    FORBIDDEN = 73
    NOT_FOUND = 74
    NOT_INSTALLED = 76
    CONFLICT = 77
    TIMED_OUT = 78
    JOB_FAILED = 79
    SERVER_ERROR = 80
    STORAGE_FAILED = 85
    INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandExitMeaning:
    """Row of the table of exit codes."""

    code: int
    name: str
    meaning: str
    way_out: str


def _row(code: CommandExit, meaning: str, way_out: str) -> CommandExitMeaning:
    return CommandExitMeaning(code=int(code), name=code.name, meaning=meaning, way_out=way_out)


COMMAND_EXITS: tuple[CommandExitMeaning, ...] = (
    _row(
        CommandExit.DIFFERENT,
        "what was compared differs, or a check failed",
        "nothing: it is a result, as of diff(1)",
    ),
    _row(CommandExit.USAGE, "an option or argument is missing or wrong", "see the command's --help"),
    _row(
        CommandExit.INVALID,
        "a file or field that you wrote is refused, here or by the API server",
        "correct what the message names",
    ),
    _row(
        CommandExit.CHECKPOINT_UNUSABLE,
        "a checkpoint is damaged, unreadable or does not exist; or a run's folder cannot be written",
        "take another checkpoint (zerotrain checkpoint ls), or make the folder readable and writable",
    ),
    _row(
        CommandExit.DOES_NOT_FIT,
        "zerotrain plan: the job cannot fit the memory or the disk that it asks for",
        "take the nearest configuration that the answer names",
    ),
    _row(
        CommandExit.UNREACHABLE,
        "the API server does not answer, or its certificate is not trusted",
        "check the server of your kubeconfig, the network, and the clock",
    ),
    _row(
        CommandExit.NO_KUBECONFIG,
        "there is no usable kubeconfig, or no such context in it",
        "set KUBECONFIG or --kubeconfig, and see kubectl config get-contexts",
    ),
    _row(
        CommandExit.UNAUTHENTICATED,
        "the cluster does not know who you are: the token or certificate is wrong or has expired",
        "log in again, or ask for another kubeconfig",
    ),
    _row(
        CommandExit.FORBIDDEN,
        "you may not do this in this namespace",
        "ask for the ClusterRole zerotrain-editor (to look: zerotrain-viewer) in the namespace",
    ),
    _row(CommandExit.NOT_FOUND, "there is no such job, pod, log or namespace", "see zerotrain get -A"),
    _row(
        CommandExit.NOT_INSTALLED,
        "the cluster does not know ZeroTrainingJobs",
        "install the chart (docs/install.md), or choose another context",
    ),
    _row(CommandExit.CONFLICT, "the object exists, or was changed meanwhile", "look at it, then try again"),
    _row(
        CommandExit.TIMED_OUT, "the condition of the wait did not hold in time", "see zerotrain describe JOB"
    ),
    _row(
        CommandExit.JOB_FAILED,
        "the job that was waited for failed, or is stalled",
        "see zerotrain describe JOB",
    ),
    _row(
        CommandExit.SERVER_ERROR,
        "the API server, or the worker behind it, answered with a server error",
        "try again; if it lasts, ask whoever runs the cluster",
    ),
    _row(
        CommandExit.STORAGE_FAILED,
        "a volume failed while a checkpoint was read or written (input/output error, stale handle, timeout)",
        "check the volume's server and this machine's mount, then try again",
    ),
    _row(CommandExit.INTERRUPTED, "Ctrl-C", "nothing"),
)
