"""Opening files of folders in which somebody else writes: a pipe is not waited for, a device not read, and no
file without end is taken whole."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path, *, follow_link: bool = False) -> int:
    """A descriptor for reading. Raises OSError, also when it is a pipe, a device or a socket; or a link,
    which may lead out of the folder, unless `follow_link`."""
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
    """The bytes of a file of at most `limit`. Raises OSError for a larger one, and as `open_regular`."""
    with os.fdopen(open_regular(path, follow_link=follow_link), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit} bytes", str(path))
    return data
