"""One rank process of one contender: builds it, then executes commands from standard input, one per line.

`team.py` starts it as `python -m tests.benchmarks.rank '{json}'`. Answers are lines of JSON on its original
standard output, to which nothing else may write.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.contenders import CONTENDERS, Contender, Sizes, join
from tests.benchmarks.offloaded import OFFLOADED
from tests.benchmarks.trainers import TRAINERS
from tests.support.device import DEVICE


def pss_bytes() -> int:
    """Return the proportional set size of this process: private pages and its share of shared ones."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/smaps_rollup has no line Pss")


def import_engine(name: str) -> None:
    """Import what the contender will import, so that code is not counted as its memory."""
    import torch.distributed.fsdp  # noqa: F401

    if name.startswith("deepspeed"):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        importlib.import_module("deepspeed")
    if "zerotrain" in name:
        import zerotrain.runtime as zt

        _ = zt.initialize


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def wait_for_gpu() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def gpu_peak_bytes() -> int:
    """Return the peak of this process's allocated GPU memory since the last call."""
    if DEVICE != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def timed_step(contender: Contender, batch: torch.Tensor) -> dict[str, float]:
    """Return wall clock and processor time of one step, all threads."""
    cpu, began = cpu_seconds(), time.perf_counter()
    loss = contender.step(batch)
    wait_for_gpu()
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": cpu_seconds() - cpu,
        "loss": loss,
    }


def io_bytes() -> int:
    """Return the bytes that this process has read from drives and written to them, by the kernel's count."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]) + int(counts["write_bytes"])


def timed_steps(contender: Contender, batch: torch.Tensor, steps: int) -> dict[str, float]:
    """Return means over steps in a row, after one that is not timed.

    The background work of the untimed step falls into the timed ones, in place of that of the last one.
    """
    before = io_bytes()
    contender.step(batch)
    wait_for_gpu()
    cpu, began = cpu_seconds(), time.perf_counter()
    for _ in range(steps):
        loss = contender.step(batch)
    wait_for_gpu()
    found = {
        "seconds": (time.perf_counter() - began) / steps,
        "cpu_seconds": (cpu_seconds() - cpu) / steps,
        "loss": loss,
    }
    contender.settle()
    return found | {"io_bytes": (io_bytes() - before) / (steps + 1)}


def serve(task: dict[str, Any], answers: Any) -> None:
    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    name, rank, sizes = task["name"], task["rank"], Sizes(**task["sizes"])
    torch.set_num_threads(task["threads"])
    import_engine(name)
    join(rank, task["world_size"], task["store"])
    answer(base_bytes=pss_bytes())
    contender = {**CONTENDERS, **OFFLOADED, **TRAINERS}[name](sizes)
    gpu_peak_bytes()  # steps alone count
    answer(built=True)
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randint(sizes.vocabulary, (sizes.micro, sizes.context + 1), generator=generator).to(DEVICE)
    for line in sys.stdin:
        command = line.strip()
        if command == "step":
            answer(**timed_step(contender, batch))
        elif command.startswith("steps "):
            answer(**timed_steps(contender, batch, int(command.removeprefix("steps "))))
        elif command == "facts":
            answer(**contender.facts(), gpu_peak_bytes=gpu_peak_bytes())
        else:
            break


def main() -> None:
    # Engines print to standard output; the parent reads the answers from a copy of it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(json.loads(sys.argv[1]), answers)
    answers.close()
    os._exit(0)  # no engine's shutdown is part of a measurement, and some wait for each other


if __name__ == "__main__":
    main()
