"""Checks of the compute devices: GPUs, NCCL with a real collective, and data types slow on CPUs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from zerotrain.cli.doctor.finding import Finding, Group, State
from zerotrain.contract.planner import bytes_text

QUERY = "name,memory.total,driver_version,pcie.link.gen.current,pcie.link.width.current,temperature.gpu"
SMI_TIMEOUT_S = 20.0
NCCL_NUMEL = 16 << 20


def gpus() -> list[Finding]:
    """Return findings about the devices, as the driver lists them and as torch can use them."""
    group = Group("gpu")
    rows = _smi()
    nodes = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if rows is None and not nodes:
        group.add("devices", State.SKIP, "none", "no NVIDIA device here: ranks train on CPUs")
        return group.findings
    for row in rows or []:
        group.add("device", State.OK, row)
    if rows is None:
        group.add("devices", State.WARN, f"{len(nodes)} device files", "nvidia-smi is not here or failed")
    torch = _torch(group)
    if torch is None:
        return group.findings
    if not torch.cuda.is_available():
        built = torch.version.cuda or "no CUDA"
        group.add(
            "torch",
            State.FAIL,
            f"{torch.__version__}, built for {built}",
            "it cannot use the devices: install a torch that is built for the driver's CUDA",
        )
        return group.findings
    group.add("torch", State.OK, f"{torch.__version__}, CUDA {torch.version.cuda}")
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        group.check(
            f"memory of {index}",
            f"{bytes_text(free)} free of {bytes_text(total)}",
            good=free > 0.9 * total,
            note="something else uses the device",
        )
    return group.findings


def nccl() -> list[Finding]:
    """Return findings about NCCL's version, settings and network devices, and a collective over all GPUs."""
    group = Group("nccl")
    settings = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    hcas = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if not _can_use_cuda():
        group.add("library", State.SKIP, "", "no GPU that torch can use: ranks speak through gloo or memory")
        return group.findings
    import torch
    from torch.cuda import nccl as library

    version = ".".join(map(str, library.version()))  # type: ignore[no-untyped-call]
    group.add("library", State.OK, version)
    group.add("settings", State.OK, ", ".join(f"{k}={v}" for k, v in sorted(settings.items())) or "none")
    group.add("InfiniBand", State.OK, ", ".join(hcas) or "none: collectives between hosts go over TCP")
    count = torch.cuda.device_count()
    try:
        tensors = [torch.full((NCCL_NUMEL,), float(index), device=f"cuda:{index}") for index in range(count)]
        library.all_reduce(tensors)  # type: ignore[no-untyped-call]
        wanted = sum(range(count))
        right = all(float(tensor[-1]) == wanted for tensor in tensors)
        group.check("all-reduce", f"over {count} GPUs", good=right, note="wrong sums", bad=State.FAIL)
    except RuntimeError as error:
        group.add("all-reduce", State.FAIL, f"over {count} GPUs", str(error).splitlines()[0])
    return group.findings


def narrow_products() -> list[Finding]:
    """Return whether ranks that train on this machine's CPUs can compute in bf16 and fp16 at full speed."""
    group = Group("processor")
    if importlib.util.find_spec("torch") is None:
        group.add("bf16, fp16", State.SKIP, "", "torch is not installed: pip install zerotrain[runtime]")
        return group.findings
    if _can_use_cuda():
        group.add("bf16, fp16", State.SKIP, "", "ranks compute on the GPUs")
        return group.findings
    from zerotrain.runtime.matmul_support import NEEDS, cpu_multiplies_fast

    for dtype, needs in NEEDS.items():
        fast = cpu_multiplies_fast(dtype)
        group.check(
            f"{dtype} products",
            "vector code" if fast else "scalar loops",
            good=fast,
            note=f"no {needs}: training in {dtype} takes tens of times as long as in fp32 on this CPU; set "
            f"{dtype}.enabled to false",
        )
    return group.findings


def _can_use_cuda() -> bool:
    if importlib.util.find_spec("torch") is None or not list(Path("/dev").glob("nvidia[0-9]*")):
        return False
    import torch

    return torch.cuda.is_available()


def _torch(group: Group) -> Any:
    if importlib.util.find_spec("torch") is None:
        group.add("torch", State.FAIL, "not installed", "pip install zerotrain[runtime]")
        return None
    import torch

    return torch


def _smi() -> list[str] | None:
    """Return one text per device, or None if nvidia-smi is missing or failed."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={QUERY}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()]
