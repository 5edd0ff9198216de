"""Files of a Go module as Go's cache holds them: custom resources and manifests of other projects."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from deploy.devcluster.builder.paths import find_paths
from deploy.devcluster.builder.progress import Reporter
from deploy.devcluster.builder.toolchain import find_or_install
from tests.support.devcluster import REPOSITORY


def downloaded(module: str, *, sum: str) -> Path:
    """Return the folder of `path@version`, which is downloaded the first time.

    `sum` is the checksum of the module's files as in go.sum. Raises RuntimeError if the content has another
    one.
    """
    answer = _download(module, Path("/"))
    if answer["Sum"] != sum:
        raise RuntimeError(f"{module} has the sum {answer['Sum']}; expected {sum}")
    return Path(answer["Dir"])


def required(module: str, *, by: Path) -> Path:
    """Return the folder of a module in the version that the go.mod in `by` requires; go.sum checks it."""
    return Path(_download(module, by)["Dir"])


def _download(module: str, cwd: Path) -> dict[str, Any]:
    toolchain = find_or_install((1, 26), find_paths(REPOSITORY, os.environ), Reporter())
    done = subprocess.run(
        [toolchain.go, "mod", "download", "-json", module],
        env=dict(toolchain.environ),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{module} cannot be had: {done.stdout}{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
