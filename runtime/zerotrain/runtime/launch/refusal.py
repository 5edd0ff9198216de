"""Failure of a launcher that cannot start its ranks: its exit code and its message; called by `main.py`."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from zerotrain.contract.exit_codes import ExitCode, may_pass
from zerotrain.contract.launch_command import LaunchCommandError
from zerotrain.contract.progress import Termination
from zerotrain.contract.worker_environment import TERMINATION_LOG, LaunchSpec
from zerotrain.runtime.launch import termination
from zerotrain.runtime.launch.log import say

_OWN_MISTAKES = frozenset(
    {
        None,  # Python's own checks, such as of the length of a socket's path
        errno.EADDRINUSE,
        errno.EADDRNOTAVAIL,
        errno.EAFNOSUPPORT,
        errno.EACCES,
        errno.EPERM,
        errno.EEXIST,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EINVAL,
    }
)
"""Errors that are the same on every node: the user must correct a port, a path or a permission."""

_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Errors of a node's disk that is full or read-only; those that `may_pass` accepts are added to them."""


def code_of(error: Exception) -> int:
    """Return the exit code: only an error that every other attempt would meet as well ends the job for
    good."""
    if isinstance(error, LaunchCommandError):
        return int(ExitCode.BAD_CONFIG)
    if not isinstance(error, OSError) or isinstance(error, socket.gaierror) or error.errno in _OWN_MISTAKES:
        return int(ExitCode.BAD_LAUNCH)
    if error.errno in _DISK or may_pass(error.errno):
        return int(ExitCode.STORAGE_FAILED)
    return 1  # memory, descriptors: temporary, another attempt may succeed


def refuse(error: Exception, spec: LaunchSpec | None = None) -> int:
    """Report why nothing was started, in the log and, where a kubelet reads it, in the termination message.

    Returns the exit code. `spec` is None when the environment was not readable.
    """
    code = code_of(error)
    text = str(error)
    if spec is not None and code == ExitCode.STORAGE_FAILED:
        text = f"the worker cannot start: {error}; look after the node's disk, where {spec.run_dir} is"
    say(text)
    log = Path(TERMINATION_LOG) if spec is None else spec.termination_log
    if log is not None and os.path.exists(log):  # unlike Path.exists it raises no error of the disk
        attempt = 0 if spec is None else spec.attempt
        message = Termination(attempt=attempt, code=code, exception=f"{type(error).__name__}: {text}")
        termination.write(log, message)
    return code
