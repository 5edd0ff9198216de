"""The GPU kernels compile for every architecture, with few registers and without spills.

nvcc is a development dependency on x86-64; elsewhere `ZEROTRAIN_NVCC` may name one.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.tools

SOURCES = Path(__file__).parents[2] / "csrc" / "cuda"
ARCHITECTURES = {"sm_80", "sm_90", "sm_100"}
MOST_REGISTERS = {
    "sum_parts": 64,
    "quantize": 60,
    "dequantize": 40,
    "dequantize_sum": 64,
    "adam": 64,
    "adamw": 64,
}
"""Limits by the first part of a kernel's name; 64 keep 1,024 threads on a multiprocessor, with 56 bytes in
flight each."""

ENTRY = re.compile(
    r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


def nvcc() -> Path:
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    named = os.environ.get("ZEROTRAIN_NVCC")
    for path in [*([named] if named else []), *(f"{folder}/cu13/bin/nvcc" for folder in folders)]:
        if Path(path).exists():
            return Path(path)
    pytest.skip("no nvcc here: `make venv` installs it on Linux with x86-64")


def flags() -> list[str]:
    (text,) = re.findall(r"set\(ZEROTRAIN_NVCC_FLAGS ([^)]*)\)", (SOURCES / "fatbin.cmake").read_text())
    return str(text).split()


def test_registers_and_spills(tmp_path: Path) -> None:
    compiler, image = nvcc(), tmp_path / "kernels.fatbin"
    include = f"-I{compiler.resolve().parents[1]}/include"
    source = str(SOURCES / "kernels.cu")
    command = [str(compiler), include, *flags(), "-Xptxas", "-v", "-fatbin", "-o", str(image), source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    entries = ENTRY.findall(done.stdout + done.stderr)
    assert {architecture for _, architecture, *_ in entries} == ARCHITECTURES
    assert len(entries) == 3 * 36
    for name, architecture, *numbers in entries:
        stack, stores, loads, registers = map(int, numbers)
        family = re.sub(r"(\d|_(f32|bf16|f16|none|remainder))", "", name)
        assert (stack, stores, loads) == (0, 0, 0), f"{name} on {architecture} spills"
        assert registers <= MOST_REGISTERS[family], f"{name} on {architecture} has {registers} registers"
    assert 100_000 < image.stat().st_size < 5_000_000


def test_nothing_contracts_or_approximates() -> None:
    assert "--fmad=false" in flags()
    assert not [flag for flag in flags() if "fast" in flag or "ftz" in flag or "prec" in flag]
