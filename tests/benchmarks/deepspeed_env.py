"""A virtual environment with DeepSpeed from PyPI, made once under build/; only the benchmarks use it.

It sees this interpreter's torch, so that both engines run on the same one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

VERSION = "0.19.8"
FOLDER = Path(__file__).resolve().parents[2] / "build" / f"deepspeed-{VERSION}"


class DeepSpeedMissing(RuntimeError):
    """DeepSpeed could not be installed."""


def find_or_make(folder: Path = FOLDER) -> Path:
    """Return the environment's interpreter. Raises DeepSpeedMissing with pip's output."""
    python = folder / "bin" / "python"
    if python.exists() and _runs(python):
        return python
    print(f"==> installing DeepSpeed {VERSION} into {folder}", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)
    packages = Path(
        sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}, scheme="venv")
    )
    # Found after the environment's own packages; pip counts what is there as installed.
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for packages_wanted in (
        ["setuptools<81", "wheel", "ninja"],
        ["--no-build-isolation", f"deepspeed=={VERSION}"],
    ):
        done = subprocess.run([*install, *packages_wanted], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise DeepSpeedMissing(
                f"pip could not install {packages_wanted[-1]} into {folder}; give an environment that has "
                f"it with --deepspeed-python, or leave DeepSpeed out with --without-deepspeed. pip said:\n"
                f"{done.stderr[-2000:]}"
            )
    if not _runs(python):
        raise DeepSpeedMissing(f"DeepSpeed is installed in {folder} but cannot be imported there")
    return python


def _runs(python: Path) -> bool:
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    return (
        subprocess.run(
            [str(python), "-c", "import deepspeed"], env=environment, capture_output=True
        ).returncode
        == 0
    )
