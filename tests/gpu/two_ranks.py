"""Two ranks that share the device: losses beside one rank, collectives beside computation, and kept buffers.

    python3 -m tests.gpu.two_ranks CONTENDER...        CONTENDER: fsdp2 zerotrain-1 zerotrain-2 zerotrain-3

On a GPU the ranks communicate by NCCL over sockets and take turns on the card, so compare contenders, not
machines. Without a GPU they use gloo, and only the losses are compared. Prints one line of JSON per
contender.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, cast

import torch

os.environ.setdefault("ZEROTRAIN_TEST_DEVICE", "cuda" if torch.cuda.is_available() else "cpu")

import torch.distributed as dist
from torch import nn

from tests.gpu.residual import Residual
from tests.support.device import DEVICE
from tests.support.ranks import run_ranks

ON_GPU = DEVICE == "cuda"
WIDTH, BLOCKS, BATCH, STEPS = (1024, 12, 64, 4) if ON_GPU else (64, 3, 8, 3)
WIDE, DEEP = 2048, 16
MIB = 1 << 20
LAG_CYCLES = 2_000_000_000
"""Cycles for which the GPU is kept busy, about a second, so that the host runs ahead through backward."""


def main() -> None:
    reference = run_ranks(1, train, "zerotrain-0")[0]["losses"]
    for name in sys.argv[1:]:
        found = run_ranks(2, train, name)[0]
        off = max(abs(a - b) for a, b in zip(found["losses"], reference, strict=True))
        print(json.dumps({"contender": name, **found, "largest_difference": off}), flush=True)
        if off > 1e-3:
            sys.exit(f"{name}: losses {found['losses']}, of one rank {reference}")
    kept = run_ranks(2, kept_buffers)[0] if ON_GPU else {"contender": "kept buffers", "skipped": "no GPU"}
    print(json.dumps(kept), flush=True)


def config_of(stage: int, world_size: int) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // world_size,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }


def train(name: str) -> dict[str, Any]:
    """Return the losses of some steps, and on a GPU how long NCCL ran beside the rank's own kernels."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world_size > 1 else 0
    step = fsdp2_step() if name == "fsdp2" else engine_step(int(name[-1]), world_size)
    losses = []
    for seed in range(STEPS):
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(BATCH, 16, WIDTH, generator=generator).bfloat16()
        part = whole.chunk(world_size)[rank].to(DEVICE)
        loss = step(part).detach().float()
        if world_size > 1:
            dist.all_reduce(loss)
        losses.append(round(float(loss) / world_size, 5))
    return {"losses": losses, **(overlap(step, part) if ON_GPU and world_size > 1 else {})}


def fsdp2_step() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Residual(WIDTH, BLOCKS).to(DEVICE)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().square().mean()
        cast("Any", loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return cast("torch.Tensor", loss)

    return step


def engine_step(stage: int, world_size: int) -> Any:
    import zerotrain.runtime as zt

    engine = zt.initialize(model=Residual(WIDTH, BLOCKS), config=config_of(stage, world_size))[0]

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        return cast("torch.Tensor", loss)

    return step


def overlap(step: Any, x: torch.Tensor) -> dict[str, Any]:
    """Return milliseconds of the rank's own kernels, of NCCL's, and of both at once, in one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(x)
        torch.cuda.synchronize()
    kernels = [
        event
        for event in profile.events()
        if event.device_type.name == "CUDA" and "memcpy" not in event.name.lower()
    ]
    marks = sorted(
        (time, change, "nccl" in event.name.lower())
        for event in kernels
        for time, change in ((event.time_range.start, 1), (event.time_range.end, -1))
    )
    running, last = {True: 0, False: 0}, 0.0
    own = nccl = both = 0.0
    for time, change, is_nccl in marks:
        span, last = (time - last) / 1e3, time
        own += span if running[False] else 0.0
        nccl += span if running[True] else 0.0
        both += span if all(running.values()) else 0.0
        running[is_nccl] += change
    return {"own_ms": round(own, 1), "nccl_ms": round(nccl, 1), "both_ms": round(both, 1)}


def kept_buffers() -> dict[str, Any]:
    """Return how much backward's peak exceeds the memory before, with the host a whole pass ahead.

    It stays near one unit's gradients if no handle keeps what was received.
    """
    import zerotrain.runtime as zt

    layers = (
        nn.Sequential(nn.Linear(WIDE, 4 * WIDE), nn.GELU(), nn.Linear(4 * WIDE, WIDE)) for _ in range(DEEP)
    )
    model = nn.Sequential(*layers)
    numel = sum(parameter.numel() for parameter in model[0].parameters())
    config = config_of(2, 2) | {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    engine = zt.initialize(model=model, config=config)[0]
    x = torch.randn(4, WIDE, device=DEVICE).bfloat16()
    for _ in range(3):
        loss = engine(x).float().square().mean()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        cast("Any", torch.cuda)._sleep(LAG_CYCLES)
        engine.backward(loss)
        extra = torch.cuda.max_memory_allocated() - before
        torch.cuda.synchronize()
        engine.step()
    return {
        "contender": "kept buffers",
        "extra_MiB": extra // MIB,
        "unit_MiB": 2 * numel // MIB,
        "units": DEEP,
    }


if __name__ == "__main__":
    main()
