"""Time of one training step: zerotrain's stages beside DDP and FSDP2, interleaved, as ratios.

    make bench                                       # or: python tests/benchmarks/bench_step.py --help

Every contender trains the same byte-level GPT in bf16 on the same batches, in the same processes, in turn
(A B C A B C ...). The figure of a contender is the median over the rounds of its time divided by the limit's
time of the same round; the limit is forward and backward alone, without communication and optimizer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerotrain.runtime as zt
from zerotrain.contract.train_spec import GptSpec
from zerotrain.runtime.models.gpt import Gpt

Step = Callable[[torch.Tensor], None]
LIMIT = "forward+backward alone"


def plain(spec: GptSpec, micro: int) -> Step:
    """The limit: no communication, no optimizer."""
    model = make_model(spec).bfloat16()

    def step(batch: torch.Tensor) -> None:
        model(batch).backward()
        model.zero_grad(set_to_none=True)

    return step


def ddp(spec: GptSpec, micro: int) -> Step:
    """DDP on bf16 weights with torch's fused AdamW: no fp32 master, so less work than ZeRO does."""
    model = DistributedDataParallel(make_model(spec).bfloat16(), gradient_as_bucket_view=True)
    return with_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def fsdp2(spec: GptSpec, micro: int) -> Step:
    """FSDP2, a shard per block, bf16 compute over fp32 masters."""
    model = make_model(spec)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in next(m for m in model.children() if isinstance(m, nn.ModuleList)):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return with_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def with_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: torch.Tensor) -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def zero(stage: int) -> Callable[[GptSpec, int], Step]:
    """zerotrain at one stage, fp32 masters."""

    def build(spec: GptSpec, micro: int) -> Step:
        config = {
            "train_micro_batch_size_per_gpu": micro,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        }
        engine = zt.initialize(model=make_model(spec), config=config)[0]

        def step(batch: torch.Tensor) -> None:
            engine.backward(engine(batch))
            engine.step()

        return step

    return build


CONTENDERS: Mapping[str, Callable[[GptSpec, int], Step]] = {
    LIMIT: plain,
    "DDP, bf16 without master": ddp,
    "FSDP2": fsdp2,
    **{f"zerotrain stage {stage}": zero(stage) for stage in range(4)},
}


def make_model(spec: GptSpec) -> Gpt:
    torch.manual_seed(0)
    return Gpt(spec)


def run_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    spec = GptSpec(
        d_model=options.d_model, layers=options.layers, heads=options.heads, context=options.context
    )
    steps = {name: build(spec, options.micro) for name, build in CONTENDERS.items()}
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randint(256, (options.micro, options.context + 1), generator=generator)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.rounds + options.warmup):
        for name, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            step(batch)
            if number >= options.warmup:
                seconds[name].append(time.perf_counter() - started)
        if rank == 0:
            print(f"round {number + 1} of {options.rounds + options.warmup}", file=sys.stderr, flush=True)
    if rank == 0:
        report(seconds, sum(p.numel() for p in make_model(spec).parameters()), options)
    dist.destroy_process_group()


def report(seconds: Mapping[str, list[float]], parameters: int, options: argparse.Namespace) -> None:
    print(
        f"{parameters / 1e6:.1f} M parameters, {options.ranks} ranks, bf16, median of {options.rounds} rounds"
    )
    print(f"{'contender':28} {'ms':>8} {'ratio to the limit':>20} {'spread':>14}")
    for name, mine in seconds.items():
        ratios = sorted(a / b for a, b in zip(mine, seconds[LIMIT], strict=True))
        median = statistics.median(ratios)
        print(
            f"{name:28} {statistics.median(mine) * 1e3:8.0f} {median:20.2f} {ratios[0]:6.2f}-{ratios[-1]:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes: dict[str, Any] = {"ranks": 2, "rounds": 7, "warmup": 2, "micro": 2}
    sizes |= {"d_model": 512, "layers": 8, "heads": 8, "context": 128}
    for name, default in sizes.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=default, help=f"default {default}"
        )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(options, str(Path(folder) / "store")), nprocs=options.ranks)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
