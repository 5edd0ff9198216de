"""Packaging of the chart, such that equal files give an equal archive.

helm writes each file's modification time into the archive, and in a checkout that is the time of the
checkout.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

EPOCH_S = 315_532_800
"""Modification time of every packed file: 1980-01-01, as in the images."""

_SAVED = re.compile(r"saved it to: (?P<path>.+)$", re.MULTILINE)


def package(chart: Path, output: Path, *, helm: Path) -> Path:
    """Pack the chart and return the archive's path. Raises RuntimeError with helm's message."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="zerotrain-chart-") as folder:
        copy = Path(folder, chart.name)
        shutil.copytree(chart, copy)
        for path in (copy, *copy.rglob("*")):
            os.utime(path, (EPOCH_S, EPOCH_S))
        environ = {
            **os.environ,
            "TZ": "UTC",
            **{f"HELM_{kind}_HOME": folder for kind in ("CACHE", "CONFIG", "DATA")},
        }
        done = subprocess.run(
            [helm, "package", copy, "--destination", output],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
    saved = _SAVED.search(done.stdout)
    if done.returncode != 0 or saved is None:
        raise RuntimeError(f"helm package {chart}: {done.stderr}{done.stdout}")
    return Path(saved["path"].strip())
