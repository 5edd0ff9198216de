"""Step time of an engine whose units torch.compile compiles, beside the same engine without.

    python -m tests.benchmarks.bench_compile --help

Both engines are in the same rank processes and train the same GPT on the same tokens. They step in turn, in
an order that changes with each round, and the figure is the median over the rounds of the ratio of their
steps in the same round. The time of the first step shows what compiling costs; its cache is empty before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import torch

import zerotrain.runtime as zt
from tests.support import ranks
from tests.support.training import world
from zerotrain.contract.train_spec import GptSpec
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.models.gpt import Gpt

OPTIONS = {
    "ranks": 2,
    "stage": 3,
    "layers": 6,
    "width": 512,
    "context": 256,
    "samples": 2,
    "rounds": 21,
    "warmup": 2,
}


def engine_of(options: Any, *, is_compiled: bool) -> Engine:
    torch.manual_seed(0)
    spec = GptSpec(
        d_model=options.width, layers=options.layers, heads=options.width // 64, context=options.context
    )
    config = {
        "train_micro_batch_size_per_gpu": options.samples,
        "bf16": {"enabled": options.bf16},
        "compile": {"enabled": is_compiled, "backend": options.backend},
        "zero_optimization": {"stage": options.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    return zt.initialize(model=Gpt(spec), config=config)[0]


def step(engine: Engine, tokens: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of one step, of the slower rank, and the loss."""
    engine.comm.gather_record([0.0])
    began = time.perf_counter()
    loss = engine(tokens)
    engine.backward(loss)
    engine.step()
    seconds = time.perf_counter() - began
    return max(row[0] for row in engine.comm.gather_record([seconds])), loss.item()


def measure(options: Any, cache: str) -> dict[str, Any]:
    """Return the seconds of the first steps, those of each round, and the last losses, of both engines."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(world()[0])
    tokens = torch.randint(0, 256, (options.samples, options.context + 1), generator=generator)
    began = time.perf_counter()
    engines = {
        "eager": engine_of(options, is_compiled=False),
        "compiled": engine_of(options, is_compiled=True),
    }
    starts = {"initialize, both": time.perf_counter() - began}
    starts |= {f"first step, {name}": step(engine, tokens)[0] for name, engine in engines.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    losses = {}
    for index in range(options.warmup + options.rounds):
        order = list(engines.items())
        for name, engine in order if index % 2 else reversed(order):
            taken, losses[name] = step(engine, tokens)
            if index >= options.warmup:
                seconds[name].append(taken)
    for engine in engines.values():
        engine.close()
    return {"starts": starts, "seconds": seconds, "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank, default %(default)s")
    parser.add_argument("--backend", default="inductor", help="default %(default)s")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16 instead of fp32")
    options = parser.parse_args()
    ranks.TIMEOUT_S = 3600.0
    with tempfile.TemporaryDirectory() as cache:
        found = ranks.run_ranks(options.ranks, measure, options, cache)[0]
    for name, seconds in found["starts"].items():
        print(f"{name:22} {seconds:8.2f} s")
    for name, seconds in found["seconds"].items():
        print(
            f"step, {name:16} {statistics.median(seconds) * 1e3:8.1f} ms   loss {found['losses'][name]:.5f}"
        )
    pairs = zip(found["seconds"]["compiled"], found["seconds"]["eager"], strict=True)
    low, middle, high = statistics.quantiles([compiled / eager for compiled, eager in pairs], n=4)
    print(f"compiled / eager       {middle:8.3f}      middle half {low:.3f}-{high:.3f}")


if __name__ == "__main__":
    main()
