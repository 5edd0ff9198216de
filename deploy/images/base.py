"""A base image for machines without a registry: Debian's Python and its dependencies, by `mmdebstrap`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from deploy.images.context import ImageError

PACKAGES = (
    "python3-minimal",
    "libpython3-stdlib",
    "python3.11-minimal",
    "libpython3.11-stdlib",
    "ca-certificates",
    "base-files",
    "base-passwd",
    "coreutils",
    "dash",
    "findutils",
    "grep",
    "libc-bin",
    "netbase",
    "sed",
    "libstdc++6",
    "libgomp1",
)
SUITE = "bookworm"


def make_base(archive: Path) -> Path:
    """Write the root file system of the base image as a tar.

    It takes some seconds and downloads from Debian's mirrors; the tar has 95 MB.
    """
    program = shutil.which("mmdebstrap")
    if program is None:
        raise ImageError(
            "there is no mmdebstrap on PATH (Debian: apt-get install mmdebstrap); or give --base"
        )
    archive.parent.mkdir(parents=True, exist_ok=True)
    command = [
        program,
        "--quiet",
        "--variant=extract",
        f"--include={','.join(PACKAGES)}",
        SUITE,
        str(archive),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        archive.unlink(missing_ok=True)
        raise ImageError(f"mmdebstrap ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return archive
