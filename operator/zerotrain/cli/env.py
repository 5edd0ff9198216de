"""`zerotrain env` and `zerotrain version`: the facts that a bug report needs, without secrets."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated

import typer

from zerotrain.cli.options import Output, OutputOption
from zerotrain.cli.output import show, show_record

EXAMPLE = "Example: zerotrain env"
VERSION_EXAMPLE = "Example: zerotrain version"

PACKAGES = (
    "zerotrain",
    "torch",
    "numpy",
    "safetensors",
    "cryptography",
    "prometheus-client",
    "kopf",
    "kubernetes",
    "pydantic",
    "typer",
)
PREFIXES = ("ZEROTRAIN_", "NCCL_", "GLOO_", "OMP_", "MKL_", "TORCH_", "CUDA_", "PYTORCH_", "NVIDIA_")
NAMES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
SECRET_WORDS = ("TOKEN", "SECRET", "KEY", "PASSWORD", "CREDENTIAL", "AUTH")
HIDDEN = "(set, not shown)"


def env(
    machine: Annotated[
        bool,
        typer.Option("--machine", help="Also run the checks of zerotrain doctor, for about ten seconds."),
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print versions, system, native module and settings for a bug report. The values of
    variables that may be secrets are hidden; check the output before you publish it."""
    facts = {
        "packages": {name: _installed(name) for name in PACKAGES},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "system": system(),
        "native module": native(),
        "variables": variables(os.environ),
    }
    if machine:
        from zerotrain.cli.doctor.command import local

        facts["machine"] = {
            f"{item.group}: {item.name}": f"{item.state} {item.value} {item.note}".strip()
            for item in local(None)
        }
    if output is not Output.TABLE:
        show_record(facts, output)
        return
    for title, rows in facts.items():
        show(f"{title}:")
        for name, value in rows.items():
            show(f"  {name}: {value}")


def system() -> dict[str, str]:
    """Return the kernel, distribution, processor, memory and devices."""
    rows = {"kernel": f"{platform.system()} {platform.release()} {platform.machine()}"}
    try:
        rows["distribution"] = platform.freedesktop_os_release().get("PRETTY_NAME", "not known")
    except OSError:
        rows["distribution"] = "not known"
    rows["processor"] = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        "not known",
    )
    rows["cores"] = f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
    rows["memory"] = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/meminfo") if line.startswith("MemTotal")),
        "not known",
    )
    rows["NVIDIA devices"] = str(len(list(Path("/dev").glob("nvidia[0-9]*"))))
    rows["NVIDIA driver"] = next(iter(_lines("/proc/driver/nvidia/version")), "none")
    rows["in a pod"] = "yes" if os.environ.get("KUBERNETES_SERVICE_HOST") else "no"
    return rows


def native() -> dict[str, str]:
    """Return how the native module was built."""
    try:
        from zerotrain.runtime import _native
    except ImportError as error:
        return {"loaded": f"no: {error}"}
    return {
        "vector code": ", ".join(_native.isas()),
        "OpenSSL": _native.openssl_version() or "built without",
        "key memory": _native.key_memory(),
    }


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that change training, with the values of possible secrets hidden."""
    chosen = sorted(name for name in environ if name.startswith(PREFIXES) or name in NAMES)
    return {
        name: HIDDEN if any(word in name.upper() for word in SECRET_WORDS) else environ[name]
        for name in chosen
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def version(output: OutputOption = Output.TABLE) -> None:
    """Print the versions of zerotrain and of the packages that a bug report needs."""
    found = {name: _installed(name) for name in ("zerotrain", "torch", "kopf", "kubernetes")}
    found["python"] = platform.python_version()
    if output is not Output.TABLE:
        show_record(found, output)
        return
    for name, text in found.items():
        show(f"{name} {text}")


def _installed(distribution: str) -> str:
    """Return the version from the metadata: importing torch takes seconds."""
    try:
        return version_of(distribution)
    except PackageNotFoundError:
        return "not installed"
