"""A CPU that has no fast kernel for narrow products is reported at the start: once, and with the way out."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.trainer_runs import TrainerRun, config, job
from zerotrain.contract.config import load, resolve
from zerotrain.runtime.matmul_support import NEEDS, cpu_multiplies_fast, slow_products

NARROWED = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Setting that makes every x86 CPU as slow as one without AVX-512."""

FP32 = {"bf16": {"enabled": False}}
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

x86_only = pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 instructions")


@pytest.mark.unit
@x86_only
def test_the_answer_is_what_the_kernel_reports_of_this_cpu() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    wide = {"avx512bw", "avx512vl", "avx512dq"} <= flags
    converts = "avx_ne_convert" in flags
    assert cpu_multiplies_fast("bf16") == (wide or converts)
    assert cpu_multiplies_fast("fp16") == ("avx512_fp16" in flags or converts)


@pytest.mark.ranks
@x86_only
def test_a_cpu_without_the_instructions_is_slow() -> None:
    code = (
        "from zerotrain.runtime.matmul_support import NEEDS, cpu_multiplies_fast as fast\n"
        "print([fast(dtype) for dtype in NEEDS])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **NARROWED},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[False, False]"


@pytest.mark.ranks
@x86_only
def test_rank_0_logs_it_once_before_the_first_step(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path, job(steps=2), world_size=2, env=NARROWED).start()
    log = run.finish()
    assert log.count("bf16 on this CPU") == 1
    assert log.index("Set bf16.enabled to false") < log.index("step 1/2")
    assert "on this CPU" not in run.log(1)


@pytest.mark.ranks
@x86_only
def test_fp32_has_nothing_to_say(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path, job(steps=1), config=config(**FP32), world_size=1, env=NARROWED)
    assert "on this CPU" not in run.start().finish()


@pytest.fixture
def without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off the library with the fast kernels, as a user may."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({}, "bf16.enabled"),
        ({**FP32, "fp16": {"enabled": True}}, "fp16.enabled"),
        ({**FP32, "torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.enabled"),
    ],
)
@pytest.mark.usefixtures("without_onednn")
def test_the_notice_names_the_key_to_change(values: dict[str, object], key: str) -> None:
    resolved = resolve(load(config(**values)), world_size=4)
    assert f"Set {key} to false" in (slow_products(resolved, CPU) or "")
    assert slow_products(resolved, GPU) is None


@pytest.mark.unit
@pytest.mark.usefixtures("without_onednn")
def test_without_onednn_no_cpu_is_fast() -> None:
    assert not any(cpu_multiplies_fast(dtype) for dtype in NEEDS)
