"""Runs between the fork and the rank's program, by path with `python -I -S`: standard library alone.

usage: guard.py PARENT_PID DEATH_SIGNAL PROGRAM [ARG ...]

It ties the process to its launcher's life (PR_SET_PDEATHSIG survives exec), and lets SIGUSR1 and SIGUSR2, by
which the launcher collects stacks, pass over programs that have no handler for them.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
BAD_LAUNCH = 69  # ExitCode.BAD_LAUNCH: this file cannot import the package


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
        print(f"cannot start {program[0]!r}: {error.strerror}; correct spec.command", file=sys.stderr)
        sys.stderr.flush()
        os._exit(BAD_LAUNCH)


if __name__ == "__main__":
    main(sys.argv)
