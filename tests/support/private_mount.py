"""Check whether a test may make mounts that no other process sees."""

from __future__ import annotations

import shutil
import subprocess


def can_mount() -> str | None:
    """Return the reason why this machine cannot make a private mount, or None."""
    if shutil.which("unshare") is None:
        return "there is no unshare command"
    result = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stderr.strip() or None
