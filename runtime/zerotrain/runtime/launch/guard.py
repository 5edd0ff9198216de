"""Guard between the fork and the rank's program, run by path with `python -I -S`: standard library only.

usage: guard.py PARENT_PID DEATH_SIGNAL PROGRAM [ARG ...]

It ties the process to its launcher's life (PR_SET_PDEATHSIG survives exec), and makes programs without a
handler ignore SIGUSR1 and SIGUSR2, with which the launcher collects stacks.
"""

import ctypes
import errno
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
# Values of ExitCode: this file cannot import the package.
BAD_LAUNCH = 69
STORAGE_FAILED = 85

OWN_MISTAKES = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.E2BIG, errno.EINVAL),
}
"""Errors that are the same on every node: the user must correct the command."""

SHORTAGES = {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY}
"""Temporary errors: another attempt may succeed. All other errors concern the volume of the program."""


def main(argv: list[str]) -> None:
    parent, death_signal, program = int(argv[1]), int(argv[2]), argv[3:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent:  # it died before the line above
        os.kill(os.getpid(), death_signal)
    for name in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    for name in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these; the program expects the default
        signal.signal(name, signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        code, way_out = meaning_of(error)
        print(f"cannot start {program[0]!r}: {error.strerror}; {way_out}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(code)


def meaning_of(error: OSError) -> tuple[int, str]:
    """Return exit code and remedy. Only an error that every other attempt would meet as well ends the job for
    good."""
    if error.errno in OWN_MISTAKES:
        return BAD_LAUNCH, "correct spec.command"
    if error.errno in SHORTAGES:
        return 1, "another attempt may do"
    return STORAGE_FAILED, "look after the volume that the program is on"


if __name__ == "__main__":
    main(sys.argv)
