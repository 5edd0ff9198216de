"""Peak memory of `from_pretrained` and `initialize` under stage 3, beside a rank's share and one unit.

    python -m tests.benchmarks.bench_from_pretrained --help

A Llama of 1.0 B random parameters is saved in bf16 in a temporary folder (2.1 GB), loaded by transformers'
own `from_pretrained`, and taken over for training in bf16. PSS is sampled on each rank, every 5 ms, mapped
files included; the figures are what it rose above its value after imports and a first small engine.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support import hf_families
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.runtime.zero.buffer import return_free_memory

SIZES: dict[str, int] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 20,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
KINDS: dict[str, dict[str, int]] = {
    "llama": SIZES,
    "mixtral": {**SIZES, "intermediate_size": 704, "num_local_experts": 8},
}
"""Models of about 1 B parameters; the experts of the second are fused from 24 tensors in each block."""


class Sampler(threading.Thread):
    """Largest PSS of this process while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(0.005):
            self.peak = max(self.peak, pss())

    def end(self) -> int:
        """Stop; return the peak."""
        self._is_over.set()
        self.join()
        return max(self.peak, pss())


def pss() -> int:
    """Return the proportional set size of this process, in bytes."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("smaps_rollup has no Pss line")


def config(world_size: int) -> dict[str, Any]:
    """Return the configuration of a training in bf16."""
    return {**hf_families.config(world_size), "bf16": {"enabled": True}}


def measured(folder: str) -> dict[str, float]:
    """Return this rank's bytes: peak, share and largest unit; and the seconds that both calls took."""
    _, world_size = world()
    hf_families.use_stage_3()
    import transformers

    engine, *_ = zt.initialize(model=nn.Linear(8, 8), config=config(world_size))
    engine.close()
    with hf_families.stage_3(world_size):
        gc.collect()
        return_free_memory()
        before, started = pss(), time.monotonic()
        sampler = Sampler()
        sampler.start()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        loaded = pss()
        engine, *_ = zt.initialize(model=model, config=config(world_size))
        peak = sampler.end()
    units = [unit.layout for unit in engine.core.units]
    found = {
        "loaded": loaded - before,
        "peak": peak - before,
        "share": 6 * sum(engine.core.layout.shard_numel(unit) for unit in units),  # bf16 weight, fp32 master
        "unit": 2 * max(unit.padded_numel for unit in units),
        "seconds": time.monotonic() - started,
    }
    engine.close()
    return found


def make(kind: str, folder: str) -> None:
    """Save a model of random weights."""
    import transformers

    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(kind, **KINDS[kind], tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    print(f"{kind}: {sum(each.numel() for each in model.parameters()) / 1e9:.2f} B parameters")
    model.save_pretrained(folder, max_shard_size="500MB")


def main() -> None:
    """Print a row per number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default %(default)s")
    parser.add_argument("--kind", choices=KINDS, default="llama", help="default %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(1, make, options.kind, folder)
        print("ranks loaded MB  peak MB share MB  unit MB  ratio     s")
        for ranks in options.ranks:
            rows = run_ranks(ranks, measured, folder)
            row = max(rows, key=lambda each: each["peak"] / (each["share"] + each["unit"]))
            megabytes = [row[key] / 1e6 for key in ("loaded", "peak", "share", "unit")]
            ratio = row["peak"] / (row["share"] + row["unit"])
            print("{:5} {:9.0f} {:8.0f} {:8.0f} {:8.0f}".format(ranks, *megabytes), end="")
            print(f" {ratio:6.3f} {row['seconds']:5.1f}")


if __name__ == "__main__":
    main()
