"""Opening of files in folders that untrusted programs write to.

A pipe is not waited for, a device is not read, and a file without end is not read whole.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path, *, follow_link: bool = False) -> int:
    """Return a descriptor for reading.

    Raises OSError, also if the path is a pipe, a device or a socket; or a link, which may lead out of the
    folder, unless `follow_link`.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags if follow_link else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a link", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def read_regular(path: Path, limit: int, *, follow_link: bool = False) -> bytes:
    """Return the bytes of a file of at most `limit` bytes.

    Raises OSError for a larger file, and in the cases of `open_regular`.
    """
    with os.fdopen(open_regular(path, follow_link=follow_link), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit} bytes", str(path))
    return data
