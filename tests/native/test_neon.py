"""Updates on ARM give the same bits as on this processor. Needs a cross compiler and an emulator."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit


ROOT = Path(__file__).parents[2]
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
COMMON = ["kernels_baseline.cpp", "dispatch.cpp", "update.cpp"]


def build_and_run(folder: Path, compiler: str, sources: list[str], *options: str) -> list[str]:
    """Build the program, run it and return the words that it prints."""
    program = folder / compiler
    files = [str(ROOT / "csrc/cpu" / source) for source in (*COMMON, *sources)]
    command = [
        compiler,
        *FLAGS,
        *options,
        f"-I{ROOT / 'csrc/include'}",
        str(ROOT / "tests/native/neon_main.cpp"),
    ]
    subprocess.run([*command, *files, "-o", str(program)], check=True, timeout=300)
    runner = [EMULATOR] if compiler == CROSS else []
    done = subprocess.run([*runner, str(program)], check=True, capture_output=True, text=True, timeout=300)
    return done.stdout.split()


def test_arm_gives_the_same_bits(tmp_path: Path) -> None:
    missing = [name for name in (CROSS, EMULATOR) if shutil.which(name) is None]
    if missing or platform.machine() != "x86_64":
        pytest.skip(f"needs an x86-64 machine with {CROSS} and {EMULATOR}; missing: {missing}")
    here = build_and_run(tmp_path, "g++", [])
    there = build_and_run(tmp_path, CROSS, ["kernels_neon.cpp"], "-DZEROTRAIN_ARM=1", "-static")
    assert (here[0], there[0]) == ("baseline", "neon")
    assert here[1:] == there[1:]  # as many cases, the same hash
    assert here[1:3] == ["168", "0"]
