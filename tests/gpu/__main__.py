"""The check of the engine on an NVIDIA GPU, in parts: `python3 -m tests.gpu [--half 1|2 | --parts NAME...]`.

It needs no package index: any Python with torch 2.11 or later, numpy and safetensors; the native part is
built by cmake, ninja and nanobind where they are. Each part has a limit of its own and cannot stop the next.
A call takes 400 s at most; parts that it has no time for say so. Outputs, one file per part, and
`summary.json` go to the folder `--out`; a table comes last. Without a GPU, parts that need one say so, and
the others run on small sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
CALL_S = 400
"""Seconds of a call: what a GPU is lent for has room for its start, a call, and the same once more."""
LEAST_S = 15
"""Seconds below which a part is not begun."""
LINES_SHOWN = 14
ON_GPU = torch.cuda.is_available()
RUNTIME = "tests/runtime"
TESTS = [
    *(
        f"{RUNTIME}/zero/test_{name}.py"
        for name in ("parity", "resized", "overlap", "precision", "fp16", "memory")
    ),
    *(f"{RUNTIME}/zero/test_{name}.py" for name in ("gradients", "zeropp", "rng_states")),
    *(f"{RUNTIME}/offload/test_{name}.py" for name in ("parity", "param", "checkpoint", "host_sums")),
    f"{RUNTIME}/offload/test_just_in_time.py",
    *(f"{RUNTIME}/comm/test_{name}.py" for name in ("watchdog", "timing")),
    *(f"{RUNTIME}/facade/test_{name}.py" for name in ("engine_resume", "activation_checkpointing")),
    f"{RUNTIME}/checkpoint/test_engine.py",
    f"{RUNTIME}/optim/test_fused.py",
]
"""Files of tests whose property a GPU could break."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command with a limit."""

    name: str
    half: int
    limit_s: int
    command: Sequence[str]
    needs_gpu: bool = False


def module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


def tests(*files: str) -> list[str]:
    """Return the command of tests that prints each result as it comes, as a limit may end it."""
    ranks = str(min(8, os.cpu_count() or 1))
    return module("pytest", "-v", "-n", ranks, "-p", "no:cacheprovider", "--tb=short", *files)


def bench(group: str, *contenders: str) -> list[str]:
    rounds = ("--rounds", "3", "--warmup", "1")
    return module("tests.benchmarks.bench_gpu", "--groups", group, "--contenders", *contenders, *rounds)


# The cheapest answers come first.
PARTS = [
    Part(name="kernels", half=1, limit_s=60, command=module("tests.gpu.kernels")),
    Part(
        name="world of 8",
        half=1,
        limit_s=80,
        command=module(
            "tests.gpu.fake_world",
            "8",
            "fsdp2",
            "zerotrain-3",
            "zerotrain-3+free",
            "zerotrain-2",
            "zerotrain-1",
        ),
    ),
    Part(
        name="world of 64",
        half=1,
        limit_s=60,
        command=module("tests.gpu.fake_world", "64", "zerotrain-3", "zerotrain-3+qwz+qgz", "fsdp2"),
    ),
    Part(
        name="kinds of steps",
        half=1,
        limit_s=100,
        command=module(
            "tests.gpu.fake_world",
            "8",
            "zerotrain-3",
            "zerotrain-3+split",
            "zerotrain-3+fp8",
            "zerotrain-3+muon",
        ),
    ),
    Part(name="small costs", half=1, limit_s=50, command=module("tests.gpu.small_costs")),
    Part(
        name="compiled",
        half=1,
        limit_s=120,
        command=module(
            "tests.gpu.fake_world", "8", "fsdp2", "zerotrain-3+compile", "zerotrain-3+fp8+compile"
        ),
    ),
    Part(name="FP8", half=2, limit_s=80, command=module("tests.gpu.fp8")),
    Part(
        name="two ranks",
        half=2,
        limit_s=90,
        command=module("tests.gpu.two_ranks", "fsdp2", "zerotrain-3", "zerotrain-1"),
    ),
    Part(
        name="planned memory",
        half=2,
        limit_s=100,
        command=tests(f"{RUNTIME}/offload/test_gpu_memory.py"),
        needs_gpu=True,
    ),
    Part(
        name="resident step",
        half=2,
        limit_s=60,
        command=bench("resident", "fsdp2", "zerotrain-0"),
        needs_gpu=True,
    ),
    Part(
        name="offloaded step",
        half=2,
        limit_s=70,
        command=bench("offloaded", "fsdp2-offloaded", "zerotrain-3-cpu"),
        needs_gpu=True,
    ),
    Part(name="tests", half=2, limit_s=170, command=tests(*TESTS), needs_gpu=True),
]


def main() -> None:
    ends_at = time.monotonic() + CALL_S
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    environment = environment_of_parts()
    found = []
    for part in PARTS:
        if part.name in options.parts if options.parts else options.half in (None, part.half):
            found.append(run(part, environment, options.out, left_s=ends_at - time.monotonic()))
            (options.out / "summary.json").write_text(
                json.dumps({"machine": machine(), "parts": found}, indent=1)
            )
    print_table(found)
    sys.exit(any(result["outcome"] not in ("passed", "needs a GPU") for result in found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--half", type=int, choices=(1, 2), help="default: both")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="some parts alone")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check", help="default %(default)s")
    return parser.parse_args()


def environment_of_parts() -> dict[str, str]:
    """Return the environment of all parts, in which the native part is found, or built and said so."""
    folders = [os.environ.get("PYTHONPATH", ""), *(str(ROOT / name) for name in (".", "operator", "runtime"))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        "ZEROTRAIN_TEST_DEVICE": "cuda" if ON_GPU else "cpu",
    }
    asked = [sys.executable, "-c", "import zerotrain.runtime._native"]
    if subprocess.run(asked, env=environment, capture_output=True, check=False).returncode != 0:
        build_native()
    return environment


def build_native() -> None:
    """Build `_native` into the checkout."""
    import nanobind  # type: ignore[import-not-found, unused-ignore]

    began, folder = time.monotonic(), ROOT / "build" / "gpu-native"
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "nanobind_DIR": nanobind.cmake_dir(),
        "Python_EXECUTABLE": sys.executable,
        "CMAKE_INSTALL_PREFIX": str(ROOT / "runtime"),
    }
    defined = (f"-D{name}={value}" for name, value in settings.items())
    make = ["cmake", "-S", str(ROOT / "csrc"), "-B", str(folder), "-G", "Ninja", *defined]
    for command in (make, ["cmake", "--build", str(folder)], ["cmake", "--install", str(folder)]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print(f"native: built in {time.monotonic() - began:.0f} s", flush=True)


def machine() -> dict[str, Any]:
    cuda: Any = torch.cuda
    return {
        "device": cuda.get_device_name() if ON_GPU else "cpu",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, cuda.nccl.version())) if ON_GPU else None,
    }


def run(part: Part, environment: dict[str, str], out: Path, *, left_s: float = CALL_S) -> dict[str, Any]:
    """Run a part within its limit and `left_s`, and return its outcome, seconds and lines of JSON; its output
    goes to a file."""
    if part.needs_gpu and not ON_GPU:
        return {"part": part.name, "outcome": "needs a GPU", "seconds": 0, "rows": []}
    if left_s < LEAST_S:
        return {"part": part.name, "outcome": "no time left", "seconds": 0, "rows": []}
    limit_s = min(part.limit_s, int(left_s))
    log, began = out / f"{part.name.replace(' ', '-')}.txt", time.monotonic()
    with log.open("w") as file:
        # A session of its own, so that a part that runs too long ends with its ranks.
        process = subprocess.Popen(
            part.command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit_s)
            outcome = "passed" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"not over in {limit_s} s"
        finally:
            end(process)
    lines = log.read_text(errors="replace").splitlines()
    seconds = round(time.monotonic() - began)
    print(f"{part.name}: {outcome}, {seconds} s", flush=True)
    rows = list(rows_in(lines))
    if outcome != "passed" or not rows:
        for line in notable(lines):
            print(f"    {line[:400]}", flush=True)
    return {"part": part.name, "outcome": outcome, "seconds": seconds, "rows": rows}


def rows_in(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines of JSON; others, such as one that a limit cut off, are no rows."""
    for line in lines:
        if line.startswith("{"):
            with suppress(json.JSONDecodeError):
                yield json.loads(line)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a part's processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def notable(lines: Sequence[str]) -> Iterable[str]:
    """Return the tests that failed, and the last lines: a table, or an error."""
    yield from (line for line in lines if "FAILED" in line or line.startswith("E  "))
    yield from [line for line in lines if line.strip()][-LINES_SHOWN:]


def print_table(found: Sequence[dict[str, Any]]) -> None:
    print(f"\n{json.dumps(machine())}")
    for result in found:
        print(f"{result['part']:16} {result['outcome']:20} {result['seconds']:4} s")
        for row in result["rows"]:
            single = {
                key: value for key, value in row.items() if not isinstance(value, list) or len(value) < 5
            }
            print("    " + words(single))
            for item in (each for key in row.keys() - single.keys() for each in row[key]):
                print("        " + (words(item) if isinstance(item, dict) else str(item)))


def words(row: dict[str, Any]) -> str:
    return "  ".join(f"{key} {value}" for key, value in row.items())


if __name__ == "__main__":
    main()
